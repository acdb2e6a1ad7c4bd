"""Values that would take a device out of service, and versions that would lock operators out, are refused from afar."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cloud_tier.fleet.view import DeviceView, draft
from edge_agent.config import EdgeConfig, LocalModels
from edge_agent.fleet.bounds import BOUNDS
from edge_agent.fleet.steering import Steering
from router.base.errors import ConfigError
from router.fleetwire.documents import MAX_VERSION, OVERRIDABLE, DesiredConfig, encode
from router.fleetwire.overrides import leaves
from router.fleetwire.topics import Address
from router.values.settings import RouterSettings
from tests.support.steered_agent import Life, ModelessAgent


def want(version: int = 1, **tables: Any) -> DesiredConfig:
    return DesiredConfig(version=version, issued_at=datetime.now(timezone.utc), **tables)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("router.first_token_timeout_ms", 1),
        ("router.first_token_timeout_ms", 4_999.0),
        ("router.stall_timeout_ms", 1),
        ("router.max_wait_ms", 1),
        ("router.max_queue", 1),
        ("router.max_queue", 1_000_000),
        ("router.decision_log", 1_000_000),
        ("router.overload_enter", 0),
        ("router.overload_answer_tokens", 1),
        ("router.expected_answer_tokens", 1_000_000),
        ("models.context_tokens", 1),
        ("models.unload_idle_s", 0.001),
        ("models.variants", []),
    ],
)
async def test_what_would_take_the_device_out_of_service_is_refused_by_key(key: str, value: object) -> None:
    agent = ModelessAgent(router={"overload_leave": 0.0})
    table, name = key.split(".")
    wanted: dict[str, Any] = {table: {name: value} | ({"preload": []} if key == "models.variants" else {})}
    with pytest.raises(ConfigError) as refusal:
        await Steering(agent).apply(want(**wanted))
    assert refusal.value.param == key
    assert agent.loads == 0
    assert agent.config.router.overload_leave == 0.0


async def test_breaker_values_are_bounded_too() -> None:
    breaker = {"open_ms": 86_400_000, "max_open_ms": 86_400_000}
    with pytest.raises(ConfigError) as refusal:
        await Steering(ModelessAgent()).apply(want(router={"breaker": breaker}))
    assert refusal.value.param == "router.breaker.open_ms"


async def test_a_price_at_which_no_answer_is_worth_giving_is_refused() -> None:
    with pytest.raises(ConfigError) as refusal:
        await Steering(ModelessAgent()).apply(want(router={"prices": {"local_answer": 1.0}}))
    assert refusal.value.param == "router.prices.local_answer"


async def test_what_the_file_itself_says_is_never_refused() -> None:
    agent = ModelessAgent(router={"max_queue": 1}, models={"variants": [], "preload": []})
    await Steering(agent).apply(want(router={"max_queue": 1}, models={"variants": []}))
    assert agent.config.router.max_queue == 1


def test_every_bound_belongs_to_a_key_and_allows_its_default() -> None:
    defaults = dict(leaves(msgspec.to_builtins(EdgeConfig())))
    for key, (low, high) in BOUNDS.items():
        assert low <= defaults[key] <= high or defaults[key] == 0, key


async def test_a_version_at_the_end_of_all_versions_locks_nobody_out(tmp_path: Path) -> None:
    """The operator's next document, made from what the broker keeps, is obeyed."""
    async with Life(tmp_path) as life:
        await life.configurator.obey(encode(want(3, router={"max_queue": 9})))
        rogue = want(MAX_VERSION, router={"max_queue": 8})
        await life.configurator.obey(encode(rogue))
        standing = life.configurator.standing
        assert (standing.state, standing.key, standing.applied_version) == ("refused", "version", 3)
        view = DeviceView(Address("default", "d"))
        view.take("desired", encode(rogue))
        view.take("reported", encode(standing.reported()))
        proposal = draft(view, {"router": {"max_queue": 10}})
        assert proposal.desired.version == 4
        await life.configurator.obey(encode(proposal.desired))
        assert life.agent.config.router.max_queue == 10


async def test_a_refused_document_of_a_huge_version_locks_nobody_out_either(tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        payload = encode(want(3)).replace(b'"version":3', b'"version":%d,"colour":1' % (MAX_VERSION + 5))
        await life.configurator.obey(payload)
        view = DeviceView(Address("default", "d"))
        view.take("desired", payload)
        view.take("reported", encode(life.configurator.standing.reported()))
        proposal = draft(view, {"router": {"max_queue": 10}})
        await life.configurator.obey(encode(proposal.desired))
        assert life.agent.config.router.max_queue == 10


BOUNDED_BY_TYPE = {
    "router.device_first_quality_slack",
    "router.overload_leave",
    "router.breaker.window",
    "router.mixing_cost",
    "router.hedge.budget",
    "router.fairness.oldest_first",
    "router.fairness.callers",
    "router.credits.reserve",
    "models.kv_slots",
    "models.intra_op_threads",
    "models.queue_limit",
}
"""Numbers whose whole range leaves a device in service."""


def test_every_number_that_the_fleet_may_set_is_bounded() -> None:
    """A new key is thought about: its range stands in BOUNDS, or its type leaves nothing that could hurt."""
    numbers = {*_numbers(RouterSettings, "router"), *_numbers(LocalModels, "models")}
    settable = {key for key in numbers if not key.startswith("models.") or key.split(".")[1] in OVERRIDABLE["models"]}
    assert settable == BOUNDS.keys() | BOUNDED_BY_TYPE
    assert not BOUNDS.keys() & BOUNDED_BY_TYPE


def _numbers(shape: type, above: str) -> Iterator[str]:
    described = msgspec.inspect.type_info(shape)
    assert isinstance(described, msgspec.inspect.StructType)
    for field in described.fields:
        key = f"{above}.{field.name}"
        if isinstance(field.type, msgspec.inspect.StructType):
            yield from _numbers(field.type.cls, key)
        elif isinstance(field.type, (msgspec.inspect.IntType, msgspec.inspect.FloatType)):
            yield key
