"""The text of a call of a custom tool, out of arguments that come in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire.openai.custom_text import CustomText


def read(pieces: list[str]) -> str:
    reader = CustomText()
    return "".join([reader.feed(piece) for piece in pieces])


@given(st.text(), st.booleans(), st.integers(1, 9))
def test_text_comes_out_whole_wherever_its_arguments_are_parted(text: str, ascii_only: bool, size: int) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert read([arguments[at : at + size] for at in range(0, len(arguments), size)]) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (' { "input" : "a" } ', "a"),
        ('{"input": "cut in the mid', "cut in the mid"),
        ('{"inp', ""),
        ("", ""),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("*** Begin", "*** Begin"),
        (r'{"input": "half \ud834 a pair \udd1e"}', "half ? a pair ?"),
        (r'{"input": "\ud834\ud834\udd1e"}', "?𝄞"),
        (r'{"input": "no \q escape"}', r"no \q escape"),
    ],
)
def test_other_arguments(arguments: str, text: str) -> None:
    assert read([arguments]) == read(list(arguments)) == text
