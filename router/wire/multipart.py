"""Forms as they came, and where in them a field's value stands: what is passed on need not be written anew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.base.errors import InvalidRequest

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_MOST_PARTS = 64
_MOST_FIELD_BYTES = 64 * 1024
_NO_FORM = "the body is no multipart/form-data with a `boundary`: send a form, with the sound as the part `file`"


@dataclass(frozen=True, slots=True)
class Field:
    """One part of a form that is no file.

    Attributes:
        start, end: of its value in the body.
    """

    value: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Form:
    """What a form holds.

    Attributes:
        fields: the last one of each name; values: name and value of all of them.
        files: the size of each file in bytes.
        repeated: names of more than one part.
    """

    fields: dict[str, Field]
    values: tuple[tuple[str, str], ...]
    files: dict[str, int]
    repeated: frozenset[str]


def read_form(body: bytes, content_type: str) -> Form:
    """Find the parts of a form.

    Raises:
        InvalidRequest: it is none, or holds too much beside its files.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest(_NO_FORM, param="content-type")
    parts = _Parts()
    try:
        parser = MultipartParser(boundary, parts.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the request body is no valid multipart/form-data: {error}") from None
    if not parts.whole:
        raise InvalidRequest("the request body ends before its form does")
    return Form(parts.fields, tuple(parts.values), parts.files, frozenset(parts.repeated))


class _Parts:
    """What the parser has found so far; the whole body is one piece to it, so that its places are places there."""

    def __init__(self) -> None:
        self.fields: dict[str, Field] = {}
        self.values: list[tuple[str, str]] = []
        self.files: dict[str, int] = {}
        self.repeated: set[str] = set()
        self.whole = False
        self._count = 0
        self._header = self._value = self._disposition = b""
        self._data = bytearray()
        self._size = 0
        self._place: tuple[int, int] | None = None
        self._name = ""
        self._is_file = False

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_end,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._count += 1
        if self._count > _MOST_PARTS:
            raise InvalidRequest(f"the form has more than {_MOST_PARTS} parts")
        self._header = self._value = self._disposition = b""
        self._data, self._size, self._place = bytearray(), 0, None

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if self._is_file:
            return
        self._data += data[start:end]
        if len(self._data) > _MOST_FIELD_BYTES:
            raise InvalidRequest(f"`{self._name[:40]}` holds more than {_MOST_FIELD_BYTES} bytes", param=self._name)
        self._place = (start if self._place is None else self._place[0], end)

    def _part_end(self) -> None:
        if self._name in self.fields or self._name in self.files:
            self.repeated.add(self._name)
        if self._is_file:
            self.files[self._name] = self._size
            return
        start, end = self._place or (0, 0)
        field = self.fields[self._name] = Field(self._data.decode("utf-8", "replace"), start, end)
        self.values.append((self._name, field.value))

    def _end(self) -> None:
        self.whole = True
