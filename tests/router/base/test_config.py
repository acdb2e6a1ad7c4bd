"""Every mistake in a configuration is named: the key, the value, the place where it was set, the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.config import Flag, decode, load, naming_origins, overlay
from router.base.errors import ConfigError


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    names: tuple[str, ...] = ()
    api_key: str | None = None


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    x: int
    part: Part = Part()


class Window(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begins: int = 0
    ends: int = 9

    def __post_init__(self) -> None:
        if self.ends < self.begins:
            raise ValueError("window.ends is below window.begins")


class Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    part: Part = Part()
    items: tuple[Item, ...] = ()
    maybe: Part | None = None
    text: str = ""
    ratio: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    table: dict[str, int] = {}
    level: Literal["debug", "info"] | None = None
    window: Window = Window()


@pytest.fixture
def read(tmp_path: Path):
    def read_text(text: str, environ: dict[str, str] | None = None, flags: dict[str, Flag] | None = None) -> Whole:
        path = tmp_path / "c.toml"
        path.write_text(text, encoding="utf-8")
        return load(path, Whole, env_prefix="P", environ=environ or {}, flags=flags)

    return read_text


@pytest.mark.parametrize(
    ("text", "line", "param", "says"),
    [
        ("[part]\ncount = 'a'", 2, "part.count", "= 'a': Expected `int`, got `str`"),
        ("[part]\n\ncuont = 3", 3, "part.cuont", "did you mean `count`?"),
        ("[part]\nzzz = 3", 2, "part.zzz", "known keys: count, names, api_key"),
        ("part.count = 0", 1, "part.count", "= 0: Expected `int` >= 1"),
        ("\npart = { count = 0 }", 2, "part.count", "= 0"),
        ('[part] # [items]\n"count" = 0', 2, "part.count", "= 0"),
        ("[part]\n'count' = 0", 2, "part.count", "= 0"),
        ("[part]\nnames = ['a', 1]", 2, "part.names[1]", "= 1"),
        ("[maybe]\nzzz = 1", 2, "maybe.zzz", "known keys: count"),
        ("[[items]]\nx = 1\n[[items]]\nx = 'a'", 4, "items[1].x", "= 'a'"),
        ("[[items]]\nx = 1\n[[items]]\nx = 2\nparts = 3", 5, "items[1].parts", "did you mean `part`?"),
        ("[[items]]\nx = 1\n[items.part]\ncount = 0", 4, "items[0].part.count", "= 0"),
        ("[[items]]\nx = 1\n[items.part]\nzzz = 0", 4, "items[0].part.zzz", "known keys: count"),
        ("[[items]]\npart.count = 2", 1, "items[0]", "missing required field `x`"),
        ("text = '''\nratio = 3\n'''\nratio = 0.0", 4, "ratio", "= 0.0: Expected `float` > 0.0"),
        ("ratio = nan", 1, "ratio", "finite"),
        ("ratio = inf", 1, "ratio", "finite"),
        ("other = 1", 1, "other", "known keys: part, items, maybe, text, ratio, table, level, window"),
        ("text = 'a'\npart = 3", 2, "part", "Expected `object`, got `int`"),
    ],
)
def test_a_mistake_is_named(read, text, line, param, says):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert f"c.toml:{line}: " in caught.value.message
    assert says in caught.value.message
    assert caught.value.param == param


def test_a_secret_is_not_shown(read):
    with pytest.raises(ConfigError) as caught:
        read("[part]\napi_key = 12345")
    assert "12345" not in caught.value.message
    assert caught.value.param == "part.api_key"


def test_the_variable_or_flag_at_fault_is_named_not_the_file(read):
    with pytest.raises(ConfigError, match=r"^P__PART__COUNT: `part.count` = 'x'"):
        read("[part]\ncount = 2", {"P__PART__COUNT": "x"})
    with pytest.raises(ConfigError, match=r"^P__PART__ZZZ: unknown key"):
        read("", {"P__PART__ZZZ": "1"})
    with pytest.raises(ConfigError, match=r"^--count: `part.count` = 0"):
        read("", flags={"part.count": Flag("--count", 0)})
    with pytest.raises(ConfigError, match=r"^--level: `level` = 'loud': expected one of 'debug', 'info'$"):
        read("level = 'info'", flags={"level": Flag("--level", "loud")})
    with pytest.raises(ConfigError, match=r"^--ends: window.ends is below window.begins$"):
        read("[window]\nbegins = 3", {"P__WINDOW__BEGINS": "2"}, {"window.ends": Flag("--ends", 1)})
    with pytest.raises(ConfigError, match=r"c.toml:1: window.ends is below"):
        read("[window]\nends = -1")


def test_flags_beat_the_environment_beats_the_file(read):
    text = "[part]\ncount = 2\nnames = ['file']"
    environ = {"P__PART__COUNT": "3", "P__PART__NAMES": '["env"]', "OTHER__PART__COUNT": "9"}
    assert read(text).part == Part(2, ("file",))
    assert read(text, environ).part == Part(3, ("env",))
    assert read(text, environ, {"part.count": Flag("--count", 4), "ratio": Flag("--ratio", None)}).part == Part(
        4, ("env",)
    )


@pytest.mark.parametrize("raw", ["007", "3", "true", "2024-01-01", "a # b", "1\nx = 2", "", "[", '"quoted'])
def test_a_variable_for_a_text_is_taken_as_it_stands(read, raw):
    assert read("", {"P__TEXT": raw}).text == raw


def test_two_variables_can_both_be_texts_that_look_like_numbers(read):
    found = read("", {"P__TEXT": "1", "P__PART__API_KEY": "2", "P__PART__COUNT": "3"})
    assert (found.text, found.part.api_key, found.part.count) == ("1", "2", 3)


def test_variables_that_name_no_key_are_refused(read):
    with pytest.raises(ConfigError, match="P____A: names no key"):
        read("", {"P____A": "1"})
    with pytest.raises(ConfigError, match="`part` is a value, not a table"):
        read("part = 3", {"P__PART__COUNT": "1"})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*absent.toml"):
        load(tmp_path / "absent.toml", Whole)
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path, Whole)
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b'text = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(bad, Whole)
    bad.write_text("text = = 3")
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 1"):
        load(bad, Whole)


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(b'\xef\xbb\xbftext = "x"')
    assert load(path, Whole).text == "x"


def test_overlay_leaves_its_argument_alone():
    tree = {"part": {"count": 1}}
    assert overlay(tree, "P", {"P__PART__COUNT": "2"}, {"text": Flag("--text", "x")}) == {
        "part": {"count": 2},
        "text": "x",
    }
    assert tree == {"part": {"count": 1}}


def test_documents_other_than_files_name_their_source():
    with pytest.raises(ConfigError, match=r"^desired v7: `ratio` = -1"):
        decode({"ratio": -1}, Whole, source="desired v7")


class Odd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the walk itself has to tell apart."""

    pair: tuple[int, str] = (1, "a")
    parts: dict[str, Part] = {}
    either: int | Item | list[Item] | None = None
    some: Annotated[tuple[str, ...], msgspec.Meta(max_length=2)] = ()
    said: str = ""

    def __post_init__(self) -> None:
        if self.said:
            raise ValueError(self.said)


@pytest.mark.parametrize(
    ("tree", "param", "says"),
    [
        ({"x` - at `$.parts": 1}, "x` - at `$.parts", "unknown key"),
        ({"unknown field `pair`": 1}, "unknown field `pair`", "unknown key"),
        ({"parts": {"a.b[0]": {"count": 0}}}, "parts.a.b[0].count", "= 0"),
        ({"parts": {"one": {"zzz": 0}}}, "parts.one.zzz", "known keys: count"),
        ({"either": {"x": 1, "part": {"cuont": 1}}}, "either.part.cuont", "did you mean `count`"),
        ({"either": [{"x": 1}, {"x": "a"}]}, "either[1].x", "= 'a'"),
        ({"either": "a"}, "either", "= 'a'"),
        ({"pair": [1, 2]}, "pair", "got `int`"),
        ({"some": ["a", "b", "c"]}, "some", "<= 2"),
        ({"said": "Object contains unknown field `pair` - at `$.parts`"}, None, "unknown field `pair` - at `$.parts`"),
    ],
)
def test_the_fault_is_found_in_the_tree_and_not_in_a_message(tree, param, says):
    with pytest.raises(ConfigError) as caught:
        decode(tree, Odd, source="here")
    assert says in caught.value.message
    assert caught.value.param == param


def test_a_variable_for_one_of_a_list_of_words_may_look_like_a_number():
    class Choice(msgspec.Struct, forbid_unknown_fields=True):
        mode: Literal["1", "2"] = "1"
        items: list[Item] = []

    assert decode(overlay({}, "P", {"P__MODE": "2"}), Choice, source="environment").mode == "2"
    with pytest.raises(ConfigError, match=r"^P__MODE: `mode` = '3': expected one of '1', '2'$"):
        decode(overlay({}, "P", {"P__MODE": "3"}), Choice, source="environment")


_TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(["part", "items", "maybe", "text", "ratio", "table", "other"])


@given(tree=st.dictionaries(_KEYS, _TREES | st.dictionaries(st.sampled_from(["count", "names", "x"]), _TREES)))
def test_any_tree_is_decoded_or_refused_as_a_config_error(tree):
    said = "somewhere: "
    try:
        decode(tree, Whole, source="somewhere", text="[part]\ncount = 1")
    except ConfigError as error:
        said = error.message
    assert said.startswith("somewhere")


@pytest.mark.parametrize("name", ["P_PART_COUNT", "P_PART__COUNT", "P_MAYBE_API_KEY"])
def test_a_variable_that_all_but_names_a_key_is_not_passed_over(read, name: str) -> None:
    meant = {"P_MAYBE_API_KEY": "P__MAYBE__API_KEY"}.get(name, "P__PART__COUNT")
    with pytest.raises(ConfigError, match=f"{name}: .*did you mean {meant}") as failed:
        read("", {name: "3"})
    assert failed.value.param in {"part.count", "maybe.api_key"}


def test_variables_of_others_are_left_alone(read) -> None:
    kubernetes = {"P_PART_SERVICE_HOST": "10.0.0.1", "P_PORT": "tcp://10.0.0.1:80", "P_TEXT": "x"}
    assert read("", kubernetes) == Whole()
    own = read("[part]\napi_key = 'env:P_PART_API_KEY'", {"P_PART_API_KEY": "k"})
    assert own.part.api_key == "env:P_PART_API_KEY"


# ── what is found wrong after decoding ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("param", "environ", "flags", "told"),
    [
        ("part.count", {}, {}, "tier.toml:3: taken"),
        ("part.names", {}, {}, "tier.toml:2: taken"),
        ("part.count", {"T__PART__COUNT": "3"}, {}, "T__PART__COUNT: taken"),
        ("part.count", {"T__PART__COUNT": "3"}, {"part.count": Flag("--count", 4)}, "--count: taken"),
        ("--database", {}, {}, "taken"),
        (None, {}, {}, "taken"),
    ],
)
def test_what_is_found_wrong_after_decoding_is_told_with_its_place(
    tmp_path: Path, param: str | None, environ: dict[str, str], flags: dict[str, Flag], told: str
) -> None:
    path = tmp_path / "tier.toml"
    path.write_text("# a tier\n[part]\ncount = 2\n")
    with (
        pytest.raises(ConfigError) as caught,
        naming_origins(path, Whole, env_prefix="T", environ=environ, flags=flags),
    ):
        raise ConfigError("taken", param=param)
    assert caught.value.message.removeprefix(f"{tmp_path}/") == told
    assert caught.value.param == param


def test_a_place_is_told_once_and_none_where_there_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "tier.toml"
    path.write_text("[part]\ncount = 'x'\n")
    with pytest.raises(ConfigError) as caught, naming_origins(path, Whole, env_prefix="T", environ={}):
        load(path, Whole, environ={})
    assert caught.value.message.count("tier.toml:2") == 1
    with pytest.raises(ConfigError, match=r"^taken$"), naming_origins(None, Whole, env_prefix="T", environ={}):
        raise ConfigError("taken", param="part.count")
