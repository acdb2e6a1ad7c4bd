"""Words of others on a terminal: what it would obey does nothing there."""

from __future__ import annotations

import re

ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""A letter that moves a cursor, begins a command of the terminal, or turns the direction of others."""
_MOST_CHARS = 4000


def plain(words: str) -> str:
    """Return words of which a terminal obeys none: nobody clears a screen, or writes over what others said."""
    short = words if len(words) <= _MOST_CHARS else f"{words[:_MOST_CHARS]}… ({len(words)} characters in all)"
    return ACTS.sub("\ufffd", short)
