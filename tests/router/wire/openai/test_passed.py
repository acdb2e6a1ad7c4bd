"""Bodies that are passed on: what no server could read is the caller's fault, and none costs more than it is long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.base.errors import InvalidRequest
from router.values.task import PassedCall, Task
from router.wire.openai import passed
from router.wire.openai.passed import decode_rerank, decode_score, decode_sound

RERANK = b'{"model":"m","query":"q","documents":["a"],"more":%b}'


@pytest.mark.parametrize("more", [b'"\xff"', b"1e999", b"[" * 600 + b"]" * 600], ids=["bytes", "infinite", "deep"])
def test_a_field_that_nobody_here_reads_may_be_unreadable(more: bytes) -> None:
    with pytest.raises(InvalidRequest, match="cannot be passed on"):
        decode_rerank(RERANK % more)


def test_a_text_that_is_compared_with_many_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []
    size = passed._size
    monkeypatch.setattr(passed, "_size", lambda text: measured.append(text) or size(text))
    call = decode_score(b'{"model":"m","text_1":"long","text_2":["a","b","c"]}').prompt
    assert isinstance(call, PassedCall)
    assert call.inputs == (5, 5, 5)
    assert sorted(map(str, measured)) == ["a", "b", "c", "long"]


@pytest.mark.parametrize(
    ("one", "many"), [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_texts_to_compare_have_the_names_that_vllm_gives_them(one: str, many: str) -> None:
    call = decode_score(msgspec.json.encode({"model": "m", one: "long", many: ["a", "b"]})).prompt
    assert isinstance(call, PassedCall)
    assert call.inputs == (5, 5)
    with pytest.raises(InvalidRequest, match="is missing or empty"):
        decode_score(msgspec.json.encode({"model": "m", one: "long"}))


INSIDE = "http://169.254.169.254/latest"


def links_in(**fields: Any) -> tuple[str, ...]:
    body = msgspec.json.encode({"model": "m", "query": "q", "documents": ["d"], **fields})
    call = decode_rerank(body).prompt
    assert isinstance(call, PassedCall)
    return call.links


@pytest.mark.parametrize(
    "link", [INSIDE, f"\x01{INSIDE}", f"\u00a0{INSIDE}", "ht\ntp://169.254.169.254/", "\thttp:/\t/10.0.0.1"]
)
def test_links_are_found_as_programs_read_them(link: str) -> None:
    """They leave out control characters in front, and line ends and tabs anywhere."""
    assert links_in(documents=[{"content": [{"type": "image_url", "image_url": {"url": link}}]}]) == (link,)


def test_a_text_beside_a_link_hides_it_in_documents_alone() -> None:
    assert links_in(documents=[{"text": "a page", "url": INSIDE, "title": INSIDE}]) == ()
    for hidden in ({"url": INSIDE, "text": "a page"}, {"url": INSIDE, "title": "a page"}):
        assert links_in(documents=[{"content": [{"type": "image_url", "image_url": hidden}]}]) == (INSIDE,)
        assert links_in(query={"content": [hidden]}) == (INSIDE,)
    assert links_in(documents=[{"text": 1, "url": INSIDE}]) == (INSIDE,)


def test_links_of_a_form_are_found_in_every_field() -> None:
    parts = (("model", "m"), ("url", INSIDE), ("url", "https://ok.example"), ("source", INSIDE), ("prompt", INSIDE))
    written = [f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in parts]
    file = '--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--b--\r\n'
    body = ("".join(written) + file).encode()
    call = decode_sound(body, "multipart/form-data; boundary=b", Task.TRANSCRIBE).prompt
    assert isinstance(call, PassedCall)
    assert call.links == (INSIDE, "https://ok.example", INSIDE)
