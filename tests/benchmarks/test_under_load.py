"""The load under which requests are counted is the one that the picture says."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.under_load import ANSWER_TOKENS, RATES_PER_S, Timed, asks_of, fate_of, summary
from examples.demo.traffic import Ask, Reply


@pytest.mark.parametrize("rate_per_s", RATES_PER_S)
def test_a_step_offers_what_it_is_called(rate_per_s: float) -> None:
    asks = asks_of(rate_per_s, 15.0)
    times_s = [at_s for at_s, _ in asks]
    assert abs(len(asks) / 15.0 - rate_per_s) < 0.05
    assert times_s == sorted(times_s)
    assert 0.0 <= times_s[0] <= times_s[-1] < 15.0
    lengths = Counter(ask.max_tokens for _, ask in asks)
    assert max(lengths.values()) - min(lengths[tokens] for tokens in ANSWER_TOKENS) <= 1
    assert asks == asks_of(rate_per_s, 15.0)


def test_a_row_says_how_many_tokens_were_wanted_and_how_many_came() -> None:
    served = Reply(Ask("a", 48), outcome="completed", tier="edge", completion_tokens=48, ttft_ms=100.0)
    refused = Reply(Ask("b", 96), outcome="unavailable", status=503, retry_after_s=1.0)
    row = summary(1.0, 2.0, [Timed(served, 900.0, 10), Timed(refused)])
    assert (fate_of(served), fate_of(refused)) == ("device", "refused")
    assert (row["wanted_tokens_per_s"], row["answer_tokens_per_s"]) == (72.0, 24.0)
    assert (row["promise_kept_share"], row["shares"]["refused"]) == (0.5, 0.5)
