"""The stage of an encoder: unit vectors, cut where that was asked for, and one that is no number fails alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.pipelines.embedding import EncoderShape, Text, Tokens, Vector, _tokenize, encoding
from router.base.errors import ContextTooLong, InvalidRequest

SIZE = 6
numbers = st.floats(-1e6, 1e6, width=32)


def encoded(means: npt.NDArray[np.float32], dimensions: list[int | None]) -> list[Vector | Exception]:
    return list(encoding(lambda _: means, [Tokens([1] * (n + 1), cut) for n, cut in enumerate(dimensions)]))


@given(
    arrays(np.float32, (5, SIZE), elements=numbers), st.lists(st.none() | st.integers(1, SIZE), min_size=5, max_size=5)
)
def test_vectors_have_length_1_in_the_dimensions_asked_for(
    means: npt.NDArray[np.float32], dimensions: list[int | None]
) -> None:
    for number, (found, cut) in enumerate(zip(encoded(means, dimensions), dimensions, strict=True)):
        assert isinstance(found, Vector)
        assert found.tokens == number + 1
        assert found.values.dtype == np.float32
        given_row = means[number, :cut].astype(np.float64)
        length = np.linalg.norm(given_row)
        if length > 1e-15:  # the squares of less vanish in float32
            assert np.allclose(found.values, given_row / length, atol=1e-6)
        assert found.values.shape == (cut or SIZE,)


def test_a_vector_that_is_no_number_fails_alone() -> None:
    means = np.ones((4, SIZE), np.float32)
    means[1, 3], means[2, 0] = np.nan, np.inf
    found = encoded(means, [None, None, 2, 2])
    assert [isinstance(one, InvalidRequest) for one in found] == [False, True, True, False]


def test_a_vector_of_nothing_stays_as_it_is() -> None:
    (found,) = encoded(np.zeros((1, SIZE), np.float32), [None])
    assert isinstance(found, Vector)
    assert not found.values.any()


class Backend:
    """A tokenizer of words that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.batches: list[int] = []

    def encode(self, text: str) -> SimpleNamespace:
        self.seen.append(text)
        return SimpleNamespace(ids=[7] * len(text.split()))

    def encode_batch_fast(self, texts: list[str]) -> list[SimpleNamespace]:
        self.batches.append(len(texts))
        return [self.encode(text) for text in texts]


def test_a_text_that_is_surely_too_long_is_refused_unread(tmp_path: Path) -> None:
    """A megabyte takes half a second, and the texts of everybody else in its batch wait for it."""
    backend: Any = Backend()
    shape = EncoderShape(tmp_path / "tokenizer.json", 4, 100, 8)
    texts = ["a b", "x" * 401, "a b c d e", "c"]
    found = _tokenize(shape, backend, [Text(text, None) for text in texts] + [Text((1,) * 401, None)])
    assert backend.seen == ["a b", "a b c d e", "c"]
    assert [one.ids if isinstance(one, Tokens) else one.message[:45] for one in found] == [
        [7, 7],
        "`input`: one has 401 characters, this model's",
        "`input`: one has 5 tokens, this model's maxim",
        [7],
        "`input`: one has 401 tokens, this model's max",
    ]
    assert _tokenize(shape, backend, [Text("y" * 401, None)])[0].__class__ is ContextTooLong


def test_short_texts_wake_no_threads_of_the_library(tmp_path: Path) -> None:
    backend: Any = Backend()
    shape = EncoderShape(tmp_path / "tokenizer.json", 256, 100, 8)
    short, long = [Text("a b", None)] * 20, [Text("a b" * 1000, None)] * 2
    assert [len(one.ids) for one in _tokenize(shape, backend, short) if isinstance(one, Tokens)] == [2] * 20
    assert backend.batches == []
    assert len(_tokenize(shape, backend, [*short, *long])) == 22
    assert backend.batches == [22]
