"""A decision record says what was chosen, why every other candidate was not, and how it ended. It keeps no text."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from router.base.errors import OverspillError
from router.dispatch.records.decision_value import decision_of
from router.dispatch.records.record import NOT_CHOSEN, REASONS, REJECTIONS, DecisionLog, DecisionRecord
from router.policy.registry import POLICIES
from router.values.prompt import TextPrompt
from tests.support.clocks import VirtualClock
from tests.support.paths import REPOSITORY
from tests.support.router_fakes import answer, request, world


async def test_every_candidate_is_chosen_rejected_or_told_why_not():
    async with world() as w:
        w.cloud_small.available = False
        asks: list[dict[str, Any]] = [
            {},
            {"model": "tiny-int8"},
            {"min_quality": 0.9},
            {"locality": "local-only"},
            {"prompt_tokens": 3000},
            {"ttft_s": 0.07},
            {"deadline_s": 0.17},
            {"tpot_s": 0.025},
        ]
        seen = set()
        for changes in asks:
            ask = request(w.clock, max_tokens=4, **changes)
            await w.clock.run(w.read(ask))
            record = json.loads(json.dumps(w.record(ask.request_id)))
            assert len(record["candidates"]) == 4
            assert sum(c.get("chosen", False) for c in record["candidates"]) == 1
            for c in record["candidates"]:
                code = c.get("rejected") or c.get("not_chosen") or ("chosen" if c.get("chosen") else None)
                assert code in REJECTIONS or code in NOT_CHOSEN or code == "chosen"
                assert code == "chosen" or c["why"]
                seen.add(code)
            assert record["chosen"]["reason"] in REASONS
            assert record["chosen"]["why"] == REASONS[record["chosen"]["reason"]]
        assert {"other-model", "quality", "locality", "context", "unhealthy", "remote"} <= seen
        assert {"smaller", "ttft", "tpot", "deadline"} <= seen


async def test_times_are_milliseconds_since_the_request_was_accepted():
    async with world() as w:
        await w.clock.advance(5.0)
        ask = request(w.clock, prompt_tokens=200, max_tokens=5, ttft_s=1.0, priority=2)
        await w.clock.run(w.read(ask))
        record = w.record(ask.request_id)
        assert record["ttft_ms"] == pytest.approx(220.0)
        assert record["finish_ms"] == pytest.approx(300.0)
        assert record["objective"]["ttft_ms"] == 1000.0
        assert record["objective"]["priority"] == 2
        assert record["predicted_ttft_ms"] < record["predicted_ttft_high_ms"]
        assert [(e["event"], e["at_ms"]) for e in record["events"]] == [
            ("sent", 0.0),
            ("first_token", pytest.approx(220.0)),
            ("finished", pytest.approx(300.0)),
        ]


async def test_waiting_and_refusal_are_on_record():
    async with world(remote=False, max_queue=1) as w:
        w.dispatcher.set_replicas([w.local])
        asks = [request(w.clock, max_tokens=24) for _ in range(6)]
        work = [asyncio.ensure_future(w.read(ask)) for ask in asks]
        results = await w.clock.run(asyncio.gather(*work, return_exceptions=True))
        (away,) = [index for index, result in enumerate(results) if isinstance(result, OverspillError)]
        refused = w.record(asks[away].request_id)
        assert refused["outcome"] in {"shed", "evicted"}
        assert "queue is full" in refused["error"]
        assert (refused["error_code"], refused["should_retry"]) == (refused["outcome"], True)
        assert refused["retry_after_ms"] > 0
        waited = [index for index, ask in enumerate(asks) if "queued" in str(w.record(ask.request_id)["events"])]
        assert len(waited) == 1
        assert away not in waited, "the newest of equals never waited"
        assert results[0][1] == answer(24)


def test_a_record_keeps_no_text():
    ask = request(VirtualClock(), prompt=TextPrompt("a secret"), continuation="and more")
    record = DecisionRecord.of(ask, "quality-in-objective")
    assert "secret" not in repr(record)
    assert "more" not in repr(record)
    assert decision_of(record).to_json()["outcome"] == "running"


def test_events_are_bounded():
    record = DecisionRecord.of(request(VirtualClock()), "x")
    for index in range(1000):
        record.happened(float(index), "attempt_failed")
    assert len(record.events) == 64


def test_the_log_keeps_the_most_recent():
    clock, log = VirtualClock(), DecisionLog(3)
    asks = [request(clock) for _ in range(5)]
    for ask in [*asks, asks[2]]:
        log.add(DecisionRecord.of(ask, "x"))
    assert [log.get(a.request_id) is not None for a in asks] == [False, False, True, True, True]
    log.capacity = 1
    log.trim()
    assert len(log) == 1
    assert log.get(asks[2].request_id) is not None


def test_the_documentation_names_every_code():
    text = (REPOSITORY / "docs" / "routing.md").read_text(encoding="utf-8")
    for code, meaning in REASONS.items():
        assert f"| `{code}` | {meaning} |" in text
    for code in (*REJECTIONS, *POLICIES):
        assert f"`{code}`" in text


def test_a_full_log_drops_the_oldest_of_whoever_has_most():
    rng, clock, log, kept = random.Random(2), VirtualClock(), DecisionLog(12), dict[str, list[str]]()
    for index in range(400):
        if index == 200:
            log.capacity = 5
        caller, name = rng.choice("aaabcdefgh"), f"{rng.randrange(60)}"
        log.add(DecisionRecord.of(request(clock, request_id=name, caller=caller), "slo-utility"))
        own = kept.setdefault(caller, [])
        if name in own:
            own.remove(name)
        own.append(name)
        while sum(map(len, kept.values())) > log.capacity:
            most = max(map(len, kept.values()))
            shrunk = [who for who, names in kept.items() if len(names) == most and log.get(names[0], who) is None]
            assert len(shrunk) >= 1
            kept[shrunk[0]].pop(0)
        assert sorted((record.caller, record.request_id) for record in log) == sorted(
            (who, name) for who, names in kept.items() for name in names
        )
        assert len(log) == sum(map(len, kept.values()))
