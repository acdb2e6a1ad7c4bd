"""Bodies that are passed on: what no server could read is the caller's fault, and none costs more than it is long."""

from __future__ import annotations

import pytest

from router.base.errors import InvalidRequest
from router.values.task import PassedCall
from router.wire.openai import passed
from router.wire.openai.passed import decode_rerank, decode_score

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
