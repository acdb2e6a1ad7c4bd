"""Which catalogue model it is that another server calls by one of its names."""

from __future__ import annotations

import pytest

from models.catalogue.families import load_catalogue
from models.catalogue.places import places_in
from router.values.replica import Place


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("smollm2-135m", Place("smollm2-135m")),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", Place("smollm2-135m")),
        ("smollm2-135m-int8", Place("smollm2-135m", 1, 0.994)),
        ("smollm2-135m-pruned-int8", Place("smollm2-135m", 3, 0.686)),
        ("smollm2", None),
        ("", None),
    ],
)
def test_a_model_is_known_by_each_of_its_names(name: str, place: Place | None) -> None:
    assert places_in(load_catalogue())(name) == place
