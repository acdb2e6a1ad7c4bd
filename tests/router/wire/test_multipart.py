"""Forms: whatever their parts hold, what is found is where it is said to be."""

from __future__ import annotations

from typing import Literal

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import InvalidRequest
from router.values.task import PassedCall, Task
from router.wire.multipart import read_form
from router.wire.openai.passed import decode_sound, named

PART = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n'
CONTROL: tuple[Literal["C"]] = ("C",)
SURROGATES: tuple[Literal["Cs"]] = ("Cs",)
names = st.text(
    st.characters(codec="utf-8", exclude_characters='"\r\n\\', exclude_categories=CONTROL), min_size=1, max_size=9
)
values = st.text(st.characters(codec="utf-8", exclude_categories=SURROGATES), max_size=200)


def written(fields: dict[str, str], file: bytes) -> tuple[bytes, str]:
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("a.wav", file)})
    return request.read(), request.headers["content-type"]


@given(st.dictionaries(names, values, max_size=5), st.binary(max_size=2000))
def test_what_is_found_is_where_it_is(fields: dict[str, str], file: bytes) -> None:
    fields.pop("file", None)
    body, kind = written(fields, file)
    form = read_form(body, kind)
    assert form.files == {"file": len(file)}
    assert {name: field.value for name, field in form.fields.items()} == fields
    for field in form.fields.values():
        assert body[field.start : field.end] == field.value.encode()


@given(
    st.text(st.characters(categories=("L", "N")), min_size=1, max_size=40), st.binary(min_size=1, max_size=500), names
)
def test_a_model_is_named_anew_and_nothing_else_changes(model: str, file: bytes, there: str) -> None:
    body, kind = written({"language": "en", "model": model}, file)
    call = decode_sound(body, kind, Task.TRANSCRIBE).prompt
    assert isinstance(call, PassedCall)
    assert named(call, model) == body
    again = read_form(named(call, there), kind)
    assert again.fields["model"].value == there
    assert again.fields["language"].value == "en"
    assert again.files == {"file": len(file)}


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        (b"", "application/json", "no multipart"),
        (b"x", "multipart/form-data", "no multipart"),
        (b"--b\r\n", "multipart/form-data; boundary=b", "ends before"),
        (b"junk", "multipart/form-data; boundary=b", "no valid multipart"),
        (PART + b"x" * 70_000 + b"\r\n--b--\r\n", "multipart/form-data; boundary=b", "more than 65536 bytes"),
        ((PART + b"x\r\n") * 65 + b"--b--\r\n", "multipart/form-data; boundary=b", "more than 64 parts"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, kind: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_form(body, kind)


@pytest.mark.parametrize("other", [b'name="model"', b'name="model"; filename=""', b'name="model"; filename="m.txt"'])
@pytest.mark.parametrize("last", [False, True])
def test_a_form_names_one_model(other: bytes, *, last: bool) -> None:
    """Servers differ in which of two they take: what was checked might not be what runs."""
    parts = [(b'name="model"', b"mine"), (other, b"theirs")]
    parts = [*(parts if last else reversed(parts)), (b'name="file"; filename="a.wav"', b"RIFF")]
    body = b"".join(b"--b\r\nContent-Disposition: form-data; %b\r\n\r\n%b\r\n" % part for part in parts)
    with pytest.raises(InvalidRequest, match="more than one part") as refused:
        decode_sound(body + b"--b--\r\n", "multipart/form-data; boundary=b", Task.TRANSCRIBE)
    assert refused.value.param == "model"
