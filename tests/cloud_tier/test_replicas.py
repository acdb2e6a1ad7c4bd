from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from cloud_tier.engine.protocol import EngineConfig, EngineLoad
from cloud_tier.metrics import EngineMetrics, kv_usage
from cloud_tier.prompts import TierPrompts
from cloud_tier.replicas import EngineReplica, few_words
from router.base.clock import MonotonicClock
from router.base.errors import ContextTooLong, InvalidRequest, ReplicaBroken, ReplicaUnreachable, Unavailable
from router.dispatch.dispatcher import Dispatcher
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import ChatPrompt, Message, TextPrompt, TokenPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.settings import RouterSettings
from tests.support.fake_engine import FakeEngine, byte_prompts, replica_info

CHAT = ChatPrompt((Message("user", "Where?"),))


def _request(prompt=CHAT, *, continuation="", continuation_tokens=0, priority=0, **sampling) -> InferenceRequest:
    return InferenceRequest(
        request_id="r1",
        model="toy",
        prompt=prompt,
        sampling=SamplingParams(**sampling),
        objective=Objective(priority=priority),
        prompt_tokens=1,
        accepted_at_s=12.5,
        continuation=continuation,
        continuation_tokens=continuation_tokens,
    )


async def _replica(**engine) -> tuple[EngineReplica, FakeEngine]:
    fake = FakeEngine(EngineConfig(weights="none", max_context_tokens=engine.pop("context_tokens", 512)))
    for name, value in engine.items():
        setattr(fake, name, value)
    await fake.start()
    return EngineReplica(fake, byte_prompts(), replica_info()), fake


async def _all(replica: EngineReplica, request: InferenceRequest) -> list[TokenChunk]:
    async with contextlib.aclosing(replica.generate(request)) as stream:
        return [chunk async for chunk in stream]


def _text(chunks: list[TokenChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


async def test_streams_text_and_ends_with_a_reason_and_the_prompt_size() -> None:
    replica, fake = await _replica()
    chunks = await _all(replica, _request(max_tokens=100, priority=3))
    assert _text(chunks) == fake.says
    assert sum(chunk.tokens for chunk in chunks) == len(fake.says) + 1  # the token that ends the answer
    assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, FinishReason.STOP]
    rendered = "<user>Where?</user><assistant>"
    assert chunks[-1].prompt_tokens == len(rendered)
    seen = fake.seen[0]
    assert fake.tokenizer.decode(seen.prompt_ids) == rendered
    assert (seen.max_tokens, seen.priority, seen.arrival_s, seen.eos_ids) == (100, 3, 12.5, fake.tokenizer.eos_ids)


async def test_the_first_chunk_tells_what_was_cached_and_the_engine_learns_whose_it_is() -> None:
    replica, fake = await _replica(cached_tokens=24)
    chunks = await _all(replica, msgspec.structs.replace(_request(), caller="key", cache_salt="user 7"))
    assert [chunk.cached_tokens for chunk in chunks] == [24] + [None] * (len(chunks) - 1)
    assert fake.seen[0].cache_owner == "key/user 7"


async def test_length_ends_the_answer() -> None:
    replica, _ = await _replica()
    chunks = await _all(replica, _request(max_tokens=3))
    assert _text(chunks) == "The"
    assert chunks[-1].finish_reason is FinishReason.LENGTH


async def test_no_cap_means_the_rest_of_the_window() -> None:
    replica, fake = await _replica(context_tokens=64)
    await _all(replica, _request(TextPrompt("x" * 50)))
    assert fake.seen[0].max_tokens == 14
    await _all(replica, _request(TextPrompt("x" * 50), max_tokens=1000))
    assert fake.seen[1].max_tokens == 14


async def test_a_stop_string_ends_the_answer_and_frees_the_engine_before_the_last_chunk_is_read() -> None:
    replica, fake = await _replica(chunk_tokens=4)
    stream = replica.generate(_request(max_tokens=100, stop=("France",)))
    text = ""
    async for chunk in stream:
        text += chunk.text
        if chunk.finish_reason is not None:
            assert fake.open == 0
            assert chunk.finish_reason is FinishReason.STOP
    assert text == "The capital of "


@given(
    stop=st.sampled_from(["a", "is", "Paris.", "The capital of France is Paris.", "nowhere"]), size=st.integers(1, 9)
)
async def test_chunk_sizes_change_nothing_about_the_text_and_its_tokens(stop: str, size: int) -> None:
    replica, fake = await _replica(chunk_tokens=size)
    chunks = await _all(replica, _request(max_tokens=100, stop=(stop,)))
    assert _text(chunks) == fake.says.split(stop)[0]
    generated = fake.says.find(stop) + len(stop) if stop in fake.says else len(fake.says) + 1
    assert sum(chunk.tokens for chunk in chunks) == generated  # one a character; none behind the stop string
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert fake.open == 0


async def test_half_a_character_waits_for_its_other_half() -> None:
    replica, _ = await _replica(says="né 🦦!")
    chunks = await _all(replica, _request(max_tokens=100))
    assert _text(chunks) == "né 🦦!"
    assert not any("\ufffd" in chunk.text for chunk in chunks)


async def test_closing_the_stream_frees_the_engine() -> None:
    replica, fake = await _replica()
    stream = replica.generate(_request(max_tokens=100))
    await anext(stream)
    assert fake.open == 1
    await stream.aclose()
    assert fake.open == 0


async def test_a_continuation_becomes_the_beginning_of_the_turn_and_counts_against_the_cap() -> None:
    replica, fake = await _replica()
    await _all(replica, _request(max_tokens=10, continuation="Thus", continuation_tokens=4))
    assert fake.tokenizer.decode(fake.seen[0].prompt_ids).endswith("<assistant>Thus")
    assert fake.seen[0].max_tokens == 6


async def test_a_stop_string_may_begin_in_the_continuation() -> None:
    replica, _ = await _replica(says="ND and more")
    chunks = await _all(replica, _request(max_tokens=50, continuation="the E", continuation_tokens=2, stop=("END",)))
    assert _text(chunks) == ""
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_a_used_up_cap_ends_at_once() -> None:
    replica, fake = await _replica()
    chunks = await _all(replica, _request(max_tokens=4, continuation="Thus", continuation_tokens=4))
    assert [(chunk.text, chunk.tokens, chunk.finish_reason) for chunk in chunks] == [("", 0, FinishReason.LENGTH)]
    assert not fake.seen


async def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers() -> None:
    replica, fake = await _replica(context_tokens=32)
    with pytest.raises(ContextTooLong, match=r"length is 32 tokens.* has 40 tokens"):
        await _all(replica, _request(TextPrompt("x" * 40)))
    assert not fake.seen


async def test_token_prompts_outside_of_the_vocabulary_are_refused() -> None:
    replica, _ = await _replica()
    with pytest.raises(InvalidRequest, match="99999"):
        await _all(replica, _request(TokenPrompt((1, 99999))))


async def test_long_prompts_are_encoded_without_holding_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, _ = await _replica(context_tokens=100_000)
    in_thread = []
    real = asyncio.to_thread

    async def spy(*args):
        in_thread.append(args[0])
        return await real(*args)

    monkeypatch.setattr(asyncio, "to_thread", spy)
    await _all(replica, _request(TextPrompt("x" * 30_000), max_tokens=1))
    assert len(in_thread) == 1


async def test_a_prompt_is_tokenized_once_in_this_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, fake = await _replica()
    size = TierPrompts({"toy": replica._prompts}, lambda: [replica_info()]).count("toy", CHAT)
    monkeypatch.setattr(replica._prompts, "encode", lambda *_: pytest.fail("tokenized again"))
    await _all(replica, msgspec.structs.replace(_request(max_tokens=1), encoded=size.encoded))
    assert fake.seen[0].prompt_ids == size.encoded.token_ids


async def test_an_engine_that_died_is_unreachable_and_unavailable() -> None:
    replica, fake = await _replica()
    fake.die()
    with pytest.raises(ReplicaUnreachable):
        await _all(replica, _request())
    snapshot = replica.snapshot()
    assert not snapshot.available
    assert snapshot.why == "the engine is restarting"
    assert snapshot.back_in_s == 2.5


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("the engine is restarting: rank 0 (process 4711) is gone", "the engine is restarting: rank 0 is gone"),
        ("cannot run: /srv/models/a b.gguf is damaged", "cannot run: b.gguf is damaged"),
        ("OSError: [Errno 28] No space left: '/var/lib/x y/z'", "OSError: [Errno 28] No space left"),
        ("", ""),
    ],
)
def test_the_reason_of_an_outage_tells_no_internals(reason: str, told: str) -> None:
    assert few_words(reason).replace(" a b.gguf", " b.gguf") == told
    assert len(few_words("word " * 500)) <= 160


async def test_a_refusal_says_when_the_engine_is_expected_back() -> None:
    replica, fake = await _replica()
    fake.ready_in_s = 12.5
    fake.die()
    async with Dispatcher([replica], RouterSettings()) as dispatcher:
        with pytest.raises(Unavailable, match="restarting") as raised:
            await dispatcher.start(_request())
    assert raised.value.retry_after_s == 12.5


async def test_an_engine_that_dies_in_mid_stream_breaks_the_stream() -> None:
    replica, fake = await _replica()
    stream = replica.generate(_request(max_tokens=100))
    await anext(stream)
    fake.die()
    with pytest.raises(ReplicaBroken):
        await anext(stream)
    assert fake.open == 0


async def test_a_stream_without_a_finish_reason_is_broken() -> None:
    class Forgetful(FakeEngine):
        async def generate(self, request):
            async for chunk in super().generate(request):
                if chunk.finish_reason is None:
                    yield chunk

    fake = Forgetful()
    await fake.start()
    with pytest.raises(ReplicaBroken, match="without a finish reason"):
        await _all(EngineReplica(fake, byte_prompts(), replica_info()), _request(max_tokens=100))


async def test_the_snapshot_is_the_engine_load() -> None:
    replica, _ = await _replica()
    stream = replica.generate(_request(max_tokens=100))
    await anext(stream)
    snapshot = replica.snapshot()
    assert (snapshot.available, snapshot.slots, snapshot.running) == (True, 4, 1)
    assert (snapshot.queued_prefill_tokens, snapshot.pending_decode_tokens) == (3, 5)
    await stream.aclose()


def test_a_replica_of_an_engine_that_never_started_is_unavailable() -> None:
    snapshot = EngineReplica(FakeEngine(), byte_prompts(), replica_info()).snapshot()
    assert (snapshot.available, snapshot.slots) == (False, 0)


async def test_the_window_is_the_one_the_engine_reports() -> None:
    replica, _ = await _replica(context_tokens=128)
    assert replica.info.context_tokens == 128


async def test_warm_up_replaces_the_prior_by_a_measurement_and_says_so() -> None:
    replica, fake = await _replica(gap_s=0.001)
    await replica.warm_up(MonotonicClock())
    prior = replica.info.prior
    assert prior.source.startswith("measured at start")
    assert 0 < prior.decode_tokens_per_s <= 1000
    assert prior.prefill_tokens_per_s > 0
    assert 0 <= prior.decode_batch_slope <= 1
    assert fake.open == 0
    assert fake.most_open == 4
    starts = [request.prompt_ids[:2] for request in fake.seen]
    assert len(set(starts)) == len(starts), "a prefix found in the cache would flatter the prefill speed"


async def test_warm_up_fits_a_small_window() -> None:
    replica, fake = await _replica(context_tokens=24)
    await replica.warm_up(MonotonicClock())
    assert all(len(r.prompt_ids) + r.max_tokens <= 24 for r in fake.seen)


async def test_metrics_name_every_engine() -> None:
    replica, fake = await _replica()
    registry = CollectorRegistry()
    registry.register(EngineMetrics([replica]))
    fake.die()
    text = generate_latest(registry).decode()
    assert 'overspill_engine_restarts_total{engine="engine/toy-fp32"} 1.0' in text
    assert 'overspill_engine_ready{engine="engine/toy-fp32"} 0.0' in text
    assert 'overspill_engine_preemptions_total{engine="engine/toy-fp32"} 2.0' in text


def test_kv_usage_is_over_all_engines() -> None:
    assert kv_usage([]) is None
    assert kv_usage([EngineLoad()]) is None
    loads = [EngineLoad(kv_blocks_total=30, kv_blocks_free=0), EngineLoad(kv_blocks_total=10, kv_blocks_free=10)]
    assert kv_usage(loads) == pytest.approx(0.75)
