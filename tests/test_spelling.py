"""One spelling of a word: whoever greps for it finds every place."""

from __future__ import annotations

import re

import pytest

from edge_agent.config import EdgeConfig
from router.base.config import decode
from router.base.errors import ConfigError
from tests.support.paths import REPOSITORY

ROOMS = ("router", "edge_agent", "cloud_tier", "models", "hardware_profiles", "tests", "benchmarks", "examples", "docs")
OTHERS = re.compile(r"catalog(?!ue)|(quanti|tokeni)" + r"s(e|ing|ation|able)", re.IGNORECASE)
FROZEN = REPOSITORY / "models/measure/calibration"


def test_catalogue_quantize_and_tokenize_are_spelt_in_one_way() -> None:
    files = [path for room in ROOMS for path in (REPOSITORY / room).rglob("*")]
    files += [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("*.py"), REPOSITORY / "pyproject.toml"]
    found = []
    for path in files:
        here = path.name == "test_spelling.py" or FROZEN in path.parents
        if path.suffix in {".py", ".md", ".toml", ".sh"} and not here:
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{path}:{number}: {line}" for number, line in enumerate(lines, 1) if OTHERS.search(line)]
    assert found == []


def test_the_key_of_before_is_an_error_that_names_the_one_of_today() -> None:
    with pytest.raises(ConfigError) as caught:
        decode({"models": {"catalog": "/srv/catalogue"}}, EdgeConfig, source="edge.toml")
    assert "models.catalog`" in caught.value.message
    assert "catalogue" in caught.value.message
