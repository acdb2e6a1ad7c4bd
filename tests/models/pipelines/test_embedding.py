"""The stage of an encoder: unit vectors, cut where that was asked for, and one that is no number fails alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from models.pipelines.embedding import Tokens, Vector, encoding
from router.base.errors import InvalidRequest

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
