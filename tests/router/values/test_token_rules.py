"""Rules for single tokens that no token can follow are refused, and what ends an answer is told once."""

from __future__ import annotations

import pytest

from router.base.errors import InvalidRequest
from router.values.sampling import SamplingParams
from router.values.token_rules import check_token_rules, ending_ids

EOS = frozenset({2})


def test_what_ends_an_answer() -> None:
    assert ending_ids(SamplingParams(), EOS) == EOS
    assert ending_ids(SamplingParams(ignore_eos=True), EOS) == frozenset()
    assert ending_ids(SamplingParams(ignore_eos=True, stop_token_ids=(7,)), EOS) == {7}
    assert ending_ids(SamplingParams(stop_token_ids=(7,)), EOS) == {2, 7}


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(logit_bias=((10, 1.0),)), "logit_bias"),
        (SamplingParams(allowed_token_ids=(1, 11)), "allowed_token_ids"),
        (SamplingParams(stop_token_ids=(10,)), "stop_token_ids"),
        (SamplingParams(allowed_token_ids=(2, 7), stop_token_ids=(7,), min_tokens=1), "allowed_token_ids"),
    ],
)
def test_rules_that_no_token_can_follow(params: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_token_rules(params, 10, EOS)
    assert raised.value.param == param


def test_rules_that_can_be_followed() -> None:
    check_token_rules(SamplingParams(logit_bias=((9, 1.0),), allowed_token_ids=(2,), stop_token_ids=(9,)), 10, EOS)
    check_token_rules(SamplingParams(allowed_token_ids=(2, 3), min_tokens=4), 10, EOS)
