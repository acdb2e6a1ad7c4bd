"""What the README, the docs and the examples say, held against the code."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer.main

from cloud_tier.config import CloudConfig
from edge_agent.config import EdgeConfig
from hardware_profiles.loader import Profile
from models.catalogue.families import Family
from overspill import PARTS
from router.simulation.world import Faults, World
from tests.support.paths import REPOSITORY
from tests.test_import_arrows import FLOORS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
PACKAGES = ("router", "edge_agent", "cloud_tier", "models", "hardware_profiles")
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "deploy/README.md"])
SHAPES = {"edge.toml": EdgeConfig, "cloud.toml": CloudConfig}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def blocks(page: Path, language: str = "[a-z]*") -> list[str]:
    """Return the fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [found[1] for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def rooms() -> list[str]:
    """Return the paths that the map in docs/architecture.md names, in its order."""
    page = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    block = page.split("## Rooms", 1)[1].split("```")[1]
    paths: list[str] = []
    folders: list[str] = []
    for line in block.strip("\n").splitlines():
        found = re.fullmatch(r"(?P<indent>(?:  )*)(?P<name>[\w.]+/?)  +(?P<what>\S.*)", line)
        assert found, f"not `name  what it does`: {line!r}"
        folders[len(found["indent"]) // 2 :] = [found["name"]]
        paths.append("".join(folders))
    return paths


def test_the_map_names_every_module_and_no_other() -> None:
    named = rooms()
    modules = {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert len(named) == len(set(named))
    assert {path for path in named if path.endswith(".py")} == modules | {"overspill.py"}
    assert {path for path in named if path.endswith("/")} == {
        f"{folder}/" for path in modules for folder in Path(path).parents if folder != Path()
    }


@each_page
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """Return what the headings of a page are linked by."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@each_page
def test_anchors_resolve(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            linked = page.parent / target if target else page
            assert anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


@each_page
def test_files_named_in_the_text_exist(page: Path) -> None:
    code = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    tops = "|".join((*PACKAGES, "tests", "benchmarks", "examples", "deploy", "docs"))
    for named in re.findall(rf"`(?:pytest )?((?:{tops})/[\w./-]*)`", code):
        assert (REPOSITORY / named).exists(), f"{page.name}: {named}"


@pytest.mark.parametrize("path", [*PAGES, REPOSITORY / "Makefile"], ids=lambda path: path.name)
def test_no_package_index_is_named(path: Path) -> None:
    """Which index pip asks is the reader's own configuration."""
    assert not re.findall(r"https?://\S*(?:pypi|/whl|/simple)\S*", path.read_text(encoding="utf-8"))


def test_the_floors_are_those_that_are_enforced() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| (`.*`) \|$", page, re.MULTILINE)
    shown = {
        package: tuple({f"{package}.{room}" for room in re.findall(r"`(\w+)`", floor)} for floor in floors.split(" · "))
        for package, floors in rows
    }
    # A floor of several rooms is written without a dot between them.
    assert shown == {package: tuple(map(set, floors)) for package, floors in FLOORS.items()}


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_the_picture_under_load_is_of_its_figures() -> None:
    """What the README says beside the picture holds for the measurement that it shows."""
    results = REPOSITORY / "benchmarks/results"
    measured = json.loads((results / "under_load.json").read_text(encoding="utf-8"))
    picture = (results / "under_load.svg").read_text(encoding="utf-8")
    assert measured["machine"]["cpu"] in picture
    assert measured["measured"] in picture
    rows = {row["offered_per_s"]: row for row in measured["result"]["rows"]}
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    under_load = readme.split("## Under load")[1].split("## Measured")[0]
    told = re.findall(r"([\d.]+) requests a second, (\d+) %", under_load)
    assert told
    for rate, percent in told:
        assert round(100 * rows[float(rate)]["promise_kept_share"]) == int(percent), rate
    assert measured["measured"] in under_load
    assert ("None failed" in under_load) == all(row["shares"]["failed"] == 0 for row in rows.values())


@cache
def part(name: str) -> Any:
    return typer.main.get_command(import_module(PARTS[name][0]).app)


def written_commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield part and arguments of every `overspill PART …` in fenced blocks and inline code."""
    code = [*re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
    for line in "\n".join(code).splitlines():
        found = re.search(r"(?:^|[\s/])overspill ([a-z]+)( .*)?$", line)
        if found:
            arguments = re.split(r"  | &", found[2] or "")[0]  # what follows on the line is no part of the command
            yield found[1], shlex.split(arguments, comments=True)


@each_page
def test_commands_exist_with_their_options(page: Path) -> None:
    for name, words in written_commands(page.read_text(encoding="utf-8")):
        assert name in PARTS, f"{page.name}: overspill {name}"
        if not words or words == ["…"]:
            continue
        called: Any = part(name)
        rest = words
        while hasattr(called, "commands") and rest and rest[0] != "…":  # else it is one command itself
            for command in rest[0].split("|"):
                assert command in called.commands, f"{page.name}: overspill {name} {command}"
            called, rest = called.commands[rest[0].split("|")[0]], rest[1:]
        known = {option for item in called.params for option in item.opts}
        for option in words[1:]:
            if option.startswith("--"):
                assert option.split("=")[0] in known, f"{page.name}: overspill {name} {words[0]} {option}"


def fields(shape: Any) -> dict[str, Any]:
    """Return the fields of a struct by name; empty for anything else."""
    kinds = [shape, *getattr(shape, "types", ())]
    kinds += [kind.item_type for kind in kinds if hasattr(kind, "item_type")]
    return {field.name: field.type for kind in kinds for field in getattr(kind, "fields", ())}


def unknown_keys(tree: dict[str, Any], shape: Any, above: str = "") -> Iterator[str]:
    known = fields(shape)
    for key, value in tree.items():
        if key not in known:
            yield above + key
            continue
        for table in value if isinstance(value, list) else [value]:
            if isinstance(table, dict) and not isinstance(known[key], msgspec.inspect.DictType):  # keys of its own
                yield from unknown_keys(table, known[key], f"{above}{key}.")


@each_page
def test_toml_blocks_and_fleet_edits_name_real_keys(page: Path) -> None:
    edge, cloud = msgspec.inspect.type_info(EdgeConfig), msgspec.inspect.type_info(CloudConfig)
    for block in blocks(page, "toml"):
        tree = tomllib.loads(block)
        if "sources" in tree:
            msgspec.convert(tree, Family)
        elif "match" in tree:
            msgspec.convert(tree, Profile)
        elif "device" in tree:
            msgspec.convert(tree, World)
        elif "faults" in tree:
            msgspec.convert(tree["faults"], Faults)
        else:
            of_the_cloud = any(entry.get("kind") == "vllm" for entry in tree.get("backends", ()))
            assert not list(unknown_keys(tree, cloud if of_the_cloud else edge)), page.name
    for name, words in written_commands(page.read_text(encoding="utf-8")):
        if name == "fleet" and words[:1] == ["set"]:
            for edit in (word for word in words[1:] if "=" in word and not word.startswith("-")):
                shape: Any = edge
                for key in edit.split("=")[0].split("."):
                    assert key in fields(shape), f"{page.name}: {edit}"
                    shape = fields(shape)[key]


def uncommented(text: str) -> str:
    """Return an example with every `# key = value` and `# [table]` that it comments out in force."""
    return re.sub(r"^# (?=\[|\w+ = )", "", text, flags=re.MULTILINE)


def missing(shape: Any, tree: dict[str, Any], above: str = "") -> Iterator[str]:
    for name, kind in fields(shape).items():
        tables = tree.get(name)
        if tables is None:
            yield above + name
        elif fields(kind):
            together = {
                key: value for t in (tables if isinstance(tables, list) else [tables]) for key, value in t.items()
            }
            yield from missing(kind, together, f"{above}{name}.")


@pytest.mark.parametrize("name", list(SHAPES))
def test_the_examples_document_every_key_and_no_other(name: str) -> None:
    shape = msgspec.inspect.type_info(SHAPES[name])
    tree = tomllib.loads(uncommented((REPOSITORY / "examples" / name).read_text(encoding="utf-8")))
    assert list(unknown_keys(tree, shape)) == []
    assert list(missing(shape, tree)) == []


def test_the_edge_example_shows_the_defaults() -> None:
    tree = tomllib.loads((REPOSITORY / "examples/edge.toml").read_text(encoding="utf-8"))
    assert msgspec.convert(tree, EdgeConfig) == EdgeConfig()


def test_every_variable_of_the_docs_is_read_somewhere() -> None:
    code = (REPOSITORY / "setup.py").read_text(encoding="utf-8") + "\n".join(
        path.read_text(encoding="utf-8")
        for package in (*PACKAGES, "examples", "tests")  # what live tests are told, they read themselves
        for path in (REPOSITORY / package).rglob("*")
        if path.suffix in {".py", ".toml"}
    )
    for page in PAGES:
        for variable in re.findall(r"\bOVERSPILL_[A-Z_]+\b", page.read_text(encoding="utf-8")):
            prefix, _, rest = variable.partition("__")
            assert f'"{prefix}"' in code or f"'{prefix}'" in code, f"{page.name}: {variable}"
            if rest:
                shape: Any = msgspec.inspect.type_info(EdgeConfig if "EDGE" in prefix else CloudConfig)
                for key in rest.lower().split("__"):
                    assert key in fields(shape), f"{page.name}: {variable}"
                    shape = fields(shape)[key]
