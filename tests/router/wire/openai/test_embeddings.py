"""Fields of /v1/embeddings that would make it another vector are refused by name, at the value that would."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from router.base.errors import InvalidRequest
from router.wire.openai.embeddings import EmbeddingRequest, decode_embeddings


def embeddings(**fields: Any) -> EmbeddingRequest:
    return decode_embeddings(orjson.dumps({"model": "m", "input": "hello", **fields}))


@pytest.mark.parametrize(
    ("name", "changing", "neutral"),
    [
        ("truncate_prompt_tokens", 100, -1),
        ("add_special_tokens", False, True),
        ("normalize", False, True),
        ("normalized", False, True),
        ("use_activation", False, True),
        ("embed_dtype", "float16", "float32"),
        ("embedding_type", "binary", "float"),
        ("output_dtype", "int8", "float"),
        ("endianness", "big", "native"),
        ("padding", "max_length", "do_not_pad"),
        ("input_type", "query", "document"),
        ("task", "retrieval.query", None),
        ("prompt_name", "query", None),
        ("late_chunking", True, False),
        ("output_dimension", 64, None),
    ],
)
def test_what_would_be_another_vector_is_refused(name: str, changing: object, neutral: object) -> None:
    with pytest.raises(InvalidRequest) as raised:
        embeddings(**{name: changing})
    assert raised.value.param == name
    assert embeddings(**{name: neutral}) == embeddings()


def test_what_changes_no_vector_is_passed_over() -> None:
    assert embeddings(user="me", truncation_side="left", cache_salt="x", vendor_extra=[1]) == embeddings()
