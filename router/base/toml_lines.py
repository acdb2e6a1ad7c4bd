"""Which line of a TOML file sets a key: for errors, where the parser has forgotten it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from router.base.shapes import Key

_HEADER = re.compile(r"\s*(?P<array>\[)?\[(?P<key>[^\[\]]+)\]")
_ASSIGNMENT = re.compile(r"""\s*(?P<key>(?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=""")
_KEY_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([\w-]+))\s*\.?""")


def line_of(text: str, key: Key) -> int | None:
    """Find the line that sets a key, or the nearest table or inline value around it."""
    best, best_length = None, 0
    for number, found in _keys_by_line(text):
        if len(found) > best_length and found == key[: len(found)]:
            best, best_length = number, len(found)
    return best


def _keys_by_line(text: str) -> Iterator[tuple[int, Key]]:
    """Yield the full key of every table header and assignment."""
    counts: dict[Key, int] = {}
    table: Key = ()
    quote = ""
    for number, line in enumerate(text.splitlines(), 1):
        if quote:  # inside of a multi-line string
            quote = "" if quote in line else quote
            continue
        header = _HEADER.match(line)
        if header:
            table = _in_arrays(_key_parts(header["key"]), counts)
            if header["array"]:
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            yield number, table
            continue
        assignment = _ASSIGNMENT.match(line)
        if assignment:
            yield number, (*table, *_key_parts(assignment["key"]))
        quote = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")


def _in_arrays(parts: Sequence[str], counts: Mapping[Key, int]) -> Key:
    """Turn the parts of a header into a key: below an array of tables, they belong to its last element."""
    key: Key = ()
    for index, part in enumerate(parts):
        key = (*key, part)
        if key in counts and index + 1 < len(parts):
            key = (*key, counts[key])
    return key


def _key_parts(text: str) -> list[str]:
    return [next(group for group in match.groups() if group is not None) for match in _KEY_PART.finditer(text)]
