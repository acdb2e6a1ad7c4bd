"""What the operator says that serving costs besides time: `[router.prices]`, and the bytes of a metered link."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.policy.slo_utility import POLICY
from router.values.choice import Choice
from router.values.request import Objective
from router.values.settings import Prices
from router.values.situation import Situation
from tests.router.policy.test_exploration import predicted, situation
from tests.support.router_fakes import request, world


def with_price(of_device: float, of_cloud: float) -> Situation:
    case = situation(Objective(deadline_s=20.0), predicted(0.02))
    here, there = case.candidates
    priced = (msgspec.structs.replace(here, price=of_device), msgspec.structs.replace(there, price=of_cloud))
    return msgspec.structs.replace(case, candidates=priced)


@pytest.mark.parametrize(
    ("of_device", "of_cloud", "remote"),
    [(0.0, 0.0, False), (0.2, 0.0, True), (0.02, 0.0, False), (0.0, 0.2, False), (0.2, 0.3, False)],
    ids=["free", "dear device", "within the slack", "dear cloud", "both dear"],
)
def test_of_equals_the_device_goes_first_unless_it_is_clearly_dearer(
    of_device: float, of_cloud: float, *, remote: bool
) -> None:
    choice = POLICY.decide(with_price(of_device, of_cloud))
    assert isinstance(choice, Choice)
    assert choice.candidate.info.remote is remote


@pytest.mark.parametrize("settings", [{}, {"prices": Prices(uplink_mbyte=1.0)}], ids=["no prices", "prices"])
async def test_the_bytes_of_a_metered_link_are_a_price_whatever_else_is_set(settings: dict[str, Any]) -> None:
    async with world(**settings) as w:
        assert w.cloud.link is not None
        w.cloud.link = msgspec.structs.replace(w.cloud.link, price_per_byte=1e-6)
        asked = request(w.clock, max_tokens=100, prompt_bytes=100_000)

        await w.clock.run(w.read(asked))
        record = w.dispatcher.decision(asked.request_id)
        assert record is not None
        assert record.situation is not None
        prices = {c.info.variant.removeprefix("tiny-"): c.price for c in record.situation.candidates}
        of_bytes = 0.1 * settings["prices"].uplink_mbyte if settings else 0.0
        assert prices["fp32"] == pytest.approx(of_bytes + 1e-6 * (100_000 + 100 * 300), rel=0.2)
        assert prices["int8"] == 0.0
        assert prices["pruned-fp32"] == pytest.approx(of_bytes)
