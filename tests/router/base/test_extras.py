"""What is missing is installed from the checkout: the project's name belongs to nobody on a package index."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest

from router.base.extras import EXTRA_OF, checkout, install
from tests.support.paths import REPOSITORY


class Installed:
    def __init__(self, record: str | None) -> None:
        self._record = record

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._record


@pytest.mark.parametrize("editable", ["", ', "dir_info": {"editable": true}'])
def test_the_remedy_names_the_folder_it_was_installed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, editable: str
) -> None:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    record = f'{{"url": "{folder.as_uri()}"{editable}}}'
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(record))
    assert checkout() is None, "it is gone"
    (folder / "pyproject.toml").touch()
    assert install("cloud") == f"pip install '{folder}[cloud]'"


@pytest.mark.parametrize("record", [None, "{}", "no json", "[]", '{"url": "https://example.org/x.whl"}'])
def test_without_a_folder_it_says_whose_checkout(monkeypatch: pytest.MonkeyPatch, record: str | None) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(record))
    assert install("edge") == "pip install '.[edge]' in your checkout of Overspill"


def test_the_extras_are_those_of_the_project() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    for library, extra in EXTRA_OF.items():
        line = re.search(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
        assert line is not None
        assert f'"{DISTRIBUTIONS.get(library, library)}' in line[1]


DISTRIBUTIONS = {"PIL": "pillow", "pynvml": "nvidia-ml-py", "grpc": "grpcio", "google": "protobuf"}
MODULES = {
    "grpcio": "grpc",
    "nvidia-ml-py": "pynvml",
    "onnxruntime-gpu": "onnxruntime",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "paho-mqtt": "paho",
    "pillow": "PIL",
    "prometheus-client": "prometheus_client",
    "protobuf": "google.protobuf",
    "python-multipart": "python_multipart",
}
READ_OUTSIDE = {"openai": "examples"}


def test_every_dependency_is_imported_somewhere() -> None:
    """What nobody imports goes: `onnxscript` and the extra `sim` were such."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    declared = text.split("[project]", 1)[1].split("[project.scripts]", 1)[0].split("\ndev = ", 1)[0]
    packages = re.findall(r'"([a-z][\w-]*)(?:\[\w+\])?[><=]', declared)
    assert len(packages) > 20
    rooms = ("router", "edge_agent", "cloud_tier", "models", "hardware_profiles", *READ_OUTSIDE.values())
    code = "\n".join(path.read_text(encoding="utf-8") for room in rooms for path in (REPOSITORY / room).rglob("*.py"))
    code += (REPOSITORY / "overspill.py").read_text(encoding="utf-8")
    for package in packages:
        module = MODULES.get(package, package)
        assert re.search(rf'(import|from) {module}\b|"{module}"', code), package


def test_nothing_tells_anyone_to_install_the_bare_name() -> None:
    rooms = ("edge_agent", "cloud_tier", "router", "models", "hardware_profiles", "deploy", "docs", "examples")
    files = [
        path for room in rooms for path in (REPOSITORY / room).rglob("*") if path.suffix in {".py", ".md", ".toml"}
    ]
    for path in [*files, REPOSITORY / "overspill.py", REPOSITORY / "README.md"]:
        assert not re.search(r"pip install '?overspill", path.read_text(encoding="utf-8")), path
