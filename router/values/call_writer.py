"""Calls of tools into text, in the form between the stages."""

from __future__ import annotations

import json

from router.values.call_reader import CallReader
from router.values.tool_calls import CLOSE, OPEN, CallDelta


class CallWriter:
    """Writes what a reader of another style, or another server, tells, in the form of this module.

    Args:
        said: text of the answer in this form that stands before.
    """

    def __init__(self, said: str = "") -> None:
        before = CallReader()
        before.feed(said)
        self._blank = not said
        self._unfinished, self._name = before.unfinished, before.begun
        self._tail = "" if self._unfinished else before.tail

    def write(self, pieces: list[str | CallDelta]) -> str:
        """Return the text of these pieces; an empty one says nothing, and ends no call."""
        return "".join(self._piece(piece) for piece in pieces if piece)

    def finish(self) -> str:
        """Close the call that is open, at an end that is no cut."""
        tail, self._tail = self._tail, ""
        return tail

    def _piece(self, piece: str | CallDelta) -> str:
        if isinstance(piece, str):
            self._unfinished = ""
            return self._said(self.finish() + piece)
        text = ""
        if piece.name:
            text = self.finish() + self._head(piece.name, "" if self._blank or self._unfinished else "\n")
        elif piece.arguments and self._unfinished:  # the name was told before, the arguments were not
            text = self._head(self._name)
        return self._said(text + piece.arguments)

    def _head(self, name: str, before: str = "") -> str:
        """Begin a call, or go on with what was begun of it."""
        head = f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": '
        unfinished, self._unfinished = self._unfinished, ""
        self._tail = f"}}\n{CLOSE}"
        return before + _behind(unfinished, head)

    def _said(self, text: str) -> str:
        self._blank = self._blank and not text
        return text


def _behind(begun: str, head: str) -> str:
    """Return the rest of `head`, whatever blanks its beginning has; all of it where it begins otherwise."""
    at = 0
    for character in begun:
        if character.isspace():
            continue
        while head[at : at + 1].isspace():
            at += 1
        if head[at : at + 1] != character:
            return head
        at += 1
    return head[at:].lstrip() if begun[-1:].isspace() else head[at:]
