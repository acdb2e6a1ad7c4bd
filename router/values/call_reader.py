"""Calls of tools out of text as it comes, in the form between the stages or a family's own."""

from __future__ import annotations

import enum
import json
import re
from dataclasses import replace

from router.values.tool_calls import CANONICAL, CLOSE, CallDelta, CallStyle

_ARGUMENTS = ("arguments", "parameters")
_LONGEST_NAME = 128
_PLAIN = re.compile(r'[^"\\]+')  # within a JSON string


class _Mode(enum.Enum):
    START = enum.auto()
    CONTENT = enum.auto()
    PLAIN = enum.auto()  # no call comes any more
    BETWEEN = enum.auto()
    OBJECT = enum.auto()


class CallReader:
    """Reads text as it comes: what was said to the user, and pieces of calls. What is no call stays text.

    Attributes:
        calls: how many have begun.
    """

    def __init__(self, style: CallStyle = CANONICAL) -> None:
        self._style = style
        self._mode = _Mode.CONTENT if style.opener else _Mode.START
        self._held = ""
        self._skip = 0  # of what is held: told before
        self._opener_told = False
        self._since: str | None = None  # the opener of a call that has no arguments yet, and what follows it
        self._object = _Object()
        self._untold: list[str | CallDelta] = []  # of a call that a caller began
        self.calls = 0

    @classmethod
    def behind(cls, said: str, style: CallStyle = CANONICAL) -> CallReader:
        """Return a reader of what follows text that was told before."""
        reader = cls(style)
        reader.feed(said)
        reader._skip_held()
        return reader

    @classmethod
    def prefilled(cls, said: str, style: CallStyle = CANONICAL) -> CallReader:
        """Return a reader of what follows a beginning by the caller's own hand, who is told the call begun there."""
        reader = cls(style)
        found = [piece for piece in reader.feed(said) if isinstance(piece, CallDelta)]
        reader._skip_held()
        if reader._is_open:
            last = reader.calls - 1
            reader._untold += [replace(piece, index=0) for piece in found if piece.index == last]
        reader.calls = len(reader._untold)
        return reader

    def feed(self, text: str) -> list[str | CallDelta]:
        """Return what can be told after this further text; half an opener waits for the rest."""
        self._held += text
        if self._since is not None:
            self._since += text
        out, self._untold = self._untold, []
        while self._step(out):
            pass
        return _joined(out)

    def finish(self) -> list[str | CallDelta]:
        """Return what was held back, at the end."""
        out, self._untold = self._untold, []
        held, self._held = self._held, ""
        if self._mode is _Mode.OBJECT:
            rest = "" if self._object.name else self._object.unread
        else:
            rest = held[self._skip :] if self._mode in (_Mode.CONTENT, _Mode.START) else ""
        return [*out, rest] if rest else out

    @property
    def unfinished(self) -> str:
        """The text of a call that may have begun and has no arguments yet."""
        if self._mode is _Mode.CONTENT:
            return self._held.lstrip("\n")
        return self._since or ""

    @property
    def begun(self) -> str:
        """The name of the call that is read now, empty where it is not known."""
        return self._object.name if self._mode is _Mode.OBJECT else ""

    @property
    def tail(self) -> str:
        """What would close the call that is open; empty where none is."""
        if self._mode is _Mode.OBJECT:
            return f"}}\n{CLOSE}"
        if self._mode is _Mode.BETWEEN and self.calls:
            return CLOSE[len(self._held.lstrip()) :]
        return ""

    @property
    def _is_open(self) -> bool:
        """Whether the last call that was read is not closed."""
        if self._mode is _Mode.OBJECT:
            return bool(self._object.name)
        return self._mode is _Mode.BETWEEN and self._since is None and self.calls > 0

    def _skip_held(self) -> None:
        """Take what was read so far as told."""
        if self._mode in (_Mode.CONTENT, _Mode.START):
            self._skip = len(self._held)
        elif self._mode is _Mode.OBJECT:
            self._object.known = len(self._object.raw)
        self._opener_told = self._since is not None

    def _step(self, out: list[str | CallDelta]) -> bool:
        """Do one thing; whether there is more to do with what is held."""
        if not self._held:
            return False
        if self._mode is _Mode.OBJECT:
            return self._read_object(out)
        if self._mode is _Mode.BETWEEN:
            return self._read_between(out)
        if self._mode is _Mode.START:
            return self._read_start()
        return self._read_content(out)

    def _read_start(self) -> bool:
        text = self._held.lstrip()
        for alias in self._style.aliases:
            if text.startswith(alias):
                self._held, text = text[len(alias) :], text[len(alias) :].lstrip()
            elif text and alias.startswith(text):
                return False
        if not text:
            return False
        self._mode = _Mode.BETWEEN if text[0] == "{" else _Mode.PLAIN
        if self._mode is _Mode.BETWEEN:
            self._skip = 0
        return True

    def _read_content(self, out: list[str | CallDelta]) -> bool:
        opener = self._style.opener
        place = self._held.find(opener) if opener and self._mode is _Mode.CONTENT else -1
        if place >= 0:
            said, self._held = self._held[self._skip : place].rstrip("\n"), self._held[place + len(opener) :]
            out.append(said)
            self._open()
            return True
        keep = 0
        if self._mode is _Mode.CONTENT:
            wait = "\n" + opener if opener else ""
            keep = next(
                (n for n in range(min(len(wait), len(self._held)), 0, -1) if _may_open(self._held[-n:], opener)), 0
            )
        cut = len(self._held) - keep
        out.append(self._held[self._skip : cut])
        self._held, self._skip = self._held[cut:], max(0, self._skip - cut)
        return False

    def _open(self) -> None:
        self._mode, self._skip, self._opener_told = _Mode.BETWEEN, 0, False
        self._since = self._style.opener + self._held

    def _read_between(self, out: list[str | CallDelta]) -> bool:
        """Pass over what stands around objects."""
        style = self._style
        self._held = held = self._held[_passed_over(self._held, style) :]
        if not held:
            return False
        if held[0] == "{":
            self._object, self._mode = _Object(), _Mode.OBJECT
            return True
        for around in (style.closer, style.opener, "]"):
            if around and held.startswith(around):
                self._held = held[len(around) :]
                if around == style.opener:
                    self._open()
                else:
                    self._mode, self._since = _Mode.CONTENT if style.opener else _Mode.PLAIN, None
                return True
            if around and around.startswith(held):
                return False
        return self._read_name(out)

    def _read_name(self, out: list[str | CallDelta]) -> bool:
        """Mistral's newer way: the name, then the arguments alone."""
        name, brace, rest = self._held.partition("{")
        if not brace and len(name) < _LONGEST_NAME and self._style.opener.startswith("["):
            return False
        called = name.removesuffix("[ARGS]").strip()
        if brace and called and called.replace("-", "_").replace(".", "_").isidentifier():
            self._object, self._mode = _Object(called), _Mode.OBJECT
            self._held = brace + rest
            return True
        self._mode = _Mode.CONTENT if self._style.opener else _Mode.PLAIN
        if not self._opener_told:
            out.append(self._style.opener)
        return self._read_content(out)

    def _read_object(self, out: list[str | CallDelta]) -> bool:
        read = self._object
        self._held = read.feed(self._held)
        if read.news_of_name:
            out.append(CallDelta(self.calls, name=read.name))
            self.calls += 1
        if (arguments := read.take_arguments()) and read.name:
            self._since = None
            out.append(CallDelta(self.calls - 1, arguments=arguments))
        if not read.done:
            return False
        if not read.name:
            out.append(read.unread)
            self._mode = _Mode.CONTENT if self._style.opener else _Mode.PLAIN
            return bool(self._held)
        self._mode = _Mode.BETWEEN
        return True


def _passed_over(text: str, style: CallStyle) -> int:
    """Return how many leading characters say nothing: blanks, what parts calls, brackets of a list but no opener."""
    blank = " \n\r\t,;]" if style.closer else " \n\r\t,;"
    for place, character in enumerate(text):
        if character in blank:
            continue
        if character != "[" or (style.opener and style.opener.startswith(text[place : place + len(style.opener)])):
            return place
    return len(text)


def _may_open(end: str, opener: str) -> bool:
    """Whether text that ends so may go on as an opener, with a line break before it."""
    return opener.startswith(end) or ("\n" + opener).startswith(end)


def _joined(pieces: list[str | CallDelta]) -> list[str | CallDelta]:
    """Join neighbours that are of one kind, and leave out what is empty."""
    out: list[str | CallDelta] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, str):
            if isinstance(last, str):
                out[-1] = last + piece
            elif piece:
                out.append(piece)
        elif isinstance(last, CallDelta) and last.index == piece.index:
            out[-1] = replace(last, arguments=last.arguments + piece.arguments)
        else:
            out.append(piece)
    return out


class _Object:
    """Reads one JSON object of a call: `name`, and the text of its arguments.

    Args:
        name: given where the object is the arguments alone.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.news_of_name = bool(name)
        self.raw = ""
        self.known = 0  # of it
        self.done = False
        self._bare = bool(name)
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._start = 0  # of the string or the value that is read now
        self._in_value = False
        self._told = 0
        self._arguments: list[str] = []
        self._had_arguments = False

    def feed(self, text: str) -> str:
        """Take text; return what stands behind the object."""
        place = 0
        while place < len(text):
            if self._in_string and not self._escaped and (plain := _PLAIN.match(text, place)):
                self.raw += plain[0]
                place = plain.end()
                continue
            self.raw += text[place]
            self._take(text[place])
            place += 1
            if self.done:
                return text[place:]
        return ""

    def take_arguments(self) -> str:
        """Return the text of the arguments since the last call, once the name is known."""
        self.news_of_name = False
        if not self.name:
            return ""
        if self._streams:
            self._arguments.append(self.raw[self._told :])
            self._told = len(self.raw)
        found = "".join(self._arguments)
        self._arguments.clear()
        return found

    @property
    def unread(self) -> str:
        """Its text, but for what was known before."""
        return self.raw[self.known :]

    @property
    def _streams(self) -> bool:
        """Whether the text that comes now is the arguments."""
        if self._bare:
            return True
        return self._in_value and self._key in _ARGUMENTS and self.raw[self._start : self._start + 1] == "{"

    def _take(self, character: str) -> None:
        if self._in_string:
            self._take_in_string(character)
        elif character == '"':
            self._in_string = True
            if self._depth == 1 and not self._in_value:
                self._start = len(self.raw) - 1
        elif character in "{[":
            self._depth += 1
            self._begin_value(character)
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(len(self.raw) - 1)
                self._finish()
            elif self._depth == 1:
                self._end_value(len(self.raw))
        elif self._depth == 1 and not self._bare:
            self._take_between(character)

    def _take_in_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._key is None:
                self._key = _string(self.raw[self._start :])

    def _take_between(self, character: str) -> None:
        if character == ":" and self._key is not None and not self._in_value:
            self._in_value = True
            self._start = self._told = len(self.raw)
        elif character == ",":
            self._end_value(len(self.raw) - 1)
        elif character.isspace() and self._in_value and not self.raw[self._start :].strip():
            self._start = self._told = len(self.raw)

    def _begin_value(self, character: str) -> None:
        if self._depth == 2 and self._in_value and character == "{":
            self._start = len(self.raw) - 1
            self._told = self._start

    def _end_value(self, end: int) -> None:
        """Take the value that ended, at depth 1."""
        if not self._in_value or self._bare:
            return
        text = self.raw[self._start : end].strip()
        if self._key == "name":
            self.name = _string(text)
            self.news_of_name = bool(self.name)
        elif self._key in _ARGUMENTS:
            self._had_arguments = True
            # As text, some models write them; what was told of an object is not told again.
            told = self.raw[self._told : end] if text.startswith("{") else _string(text) or "{}"
            self._arguments.append(told)
        self._key, self._in_value = None, False

    def _finish(self) -> None:
        self.done = True
        if not self._bare and self.name and not self._had_arguments:
            self._arguments.append("{}")


def _string(text: str) -> str:
    """Return a JSON string's text, empty for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
