"""A V2 server as a source of replicas: what it serves, when, how much it has to do, and its answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import structlog

from router.base.clock import MonotonicClock
from router.base.errors import OverspillError, ReplicaBroken, ReplicaFailed
from router.upstream.exchange.replica import UpstreamReplica
from router.upstream.servers.foreign import Surroundings
from router.upstream.settings import BackendSettings
from router.upstream.source import ReplicaSource, SourceHooks
from router.upstream.sources import backend_sources
from router.values.chunk import FinishReason
from router.values.feature import Feature
from router.values.prompt import ChatPrompt, Message, Prompt, TextPrompt
from router.values.replica import Place
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.template import no_renderers
from tests.support.foreign_server import ForeignServer, endless, status
from tests.support.gateway_fakes import gateway_deps, serving
from tests.support.triton_like import Model, TritonLike
from tests.support.waiting import until

CLOCK = MonotonicClock()
PENDING = 'nv_inference_pending_request_count{{model="text",version="1"}} {}\n'


def entry(server: TritonLike, **given: Any) -> BackendSettings:
    kserve = {"metrics_url": f":{server.port}/metrics", **given.pop("kserve", {})}
    fields = {
        "name": "triton",
        "kind": "kserve",
        "urls": [server.url],
        "poll_interval_s": 0.03,
        "warm_up": False,
        "kserve": kserve,
        **given,
    }
    return msgspec.convert(fields, BackendSettings)


@contextlib.asynccontextmanager
async def backend(
    server: TritonLike, places: Callable[[str], Place | None] = lambda _: None, renderers=no_renderers, **given: Any
) -> AsyncIterator[ReplicaSource]:
    (source,) = backend_sources(
        [entry(server, **given)], Surroundings(CLOCK, SourceHooks(), places, renderers), environ={}
    )
    async with source:
        yield source


async def replica_of(source: ReplicaSource, variant: str = "text") -> UpstreamReplica:
    def found() -> UpstreamReplica | None:
        ours = (replica for replica in source.replicas if isinstance(replica, UpstreamReplica))
        return next((r for r in ours if r.info.variant == variant and r.snapshot().available), None)

    return await until(found)


def ask(prompt: Prompt | str = "one two", continuation: str = "", **sampling: Any) -> InferenceRequest:
    return InferenceRequest(
        request_id="r-1",
        model="text",
        prompt=TextPrompt(prompt) if isinstance(prompt, str) else prompt,
        sampling=SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling}),
        objective=Objective(),
        prompt_tokens=2,
        accepted_at_s=CLOCK.now_s(),
        continuation=continuation,
        continuation_tokens=len(continuation.split()),
    )


async def answer(replica: UpstreamReplica, request: InferenceRequest) -> tuple[str, FinishReason | None, int]:
    chunks = [chunk async for chunk in replica.generate(request)]
    return "".join(c.text for c in chunks), chunks[-1].finish_reason, sum(c.tokens for c in chunks)


async def test_text_models_become_replicas_and_others_do_not() -> None:
    other = Model(inputs={"x": "FP32"}, outputs={"y": "FP32"})
    async with TritonLike(text=Model(), other=other, odd=Model(metadata=b"[")) as server:
        places = {"text": Place("family", 2, 0.7)}.get
        async with backend(server, places) as source:
            info = (await replica_of(source)).info
            assert [replica.info.variant for replica in source.replicas] == ["text"]
    assert info.replica_id == "triton/text"
    assert (info.family, info.rung, info.quality) == ("family", 2, 0.7)
    assert (info.tier, info.remote, info.backend) == ("cloud", True, "triton")
    assert {Feature.CHAT, Feature.CONTINUED_CHAT, Feature.PROMPT_IDS, Feature.SEED} <= info.lacks
    assert Feature.COMPLETIONS not in info.lacks


async def test_what_is_configured_of_a_server_is_true_of_its_replicas() -> None:
    """A canary goes by the version, `cloud-only` by the tier, an operator by the kind."""
    async with TritonLike(text=Model()) as server:
        settings = entry(server, version="24.08", local=True)
        (source,) = backend_sources(
            [settings], Surroundings(CLOCK, SourceHooks(), lambda _: None, tier="cloud"), environ={}
        )
        async with source:
            replica = await replica_of(source)
            assert (replica.info.version, replica.info.tier, replica.info.remote) == ("24.08", "cloud", False)
            assert replica.facts().kind == "triton"


async def test_a_stream_comes_word_by_word() -> None:
    model = Model()
    async with TritonLike(text=model) as server, backend(server) as source:
        assert await answer(await replica_of(source), ask()) == (" w2 w3 w4 w5", FinishReason.LENGTH, 4)
    assert model.asked == [{"text_input": "one two", "max_tokens": 4, "parameters": {"temperature": 0.0}}]


async def test_an_answer_that_broke_off_elsewhere_is_continued() -> None:
    async with TritonLike(text=Model()) as server, backend(server) as source:
        found = await answer(await replica_of(source), ask(continuation=" w2 w3"))
    assert found == (" w4 w5", FinishReason.LENGTH, 2)


async def test_a_model_that_cannot_stream_answers_in_one_piece() -> None:
    async with TritonLike(text=Model(decoupled=False)) as server, backend(server) as source:
        text, reason, tokens = await answer(await replica_of(source), ask(max_tokens=3, stop=(" w4",)))
    assert (text, reason) == (" w2 w3", FinishReason.STOP)
    assert tokens


async def test_an_ensemble_streams_where_one_of_its_steps_does() -> None:
    steps = {"ensemble_scheduling": {"step": [{"model_name": "one"}, {"model_name": "two"}]}, "max_batch_size": 4}
    inner: dict[str, Any] = {"inputs": {"x": "FP32"}, "outputs": {"y": "FP32"}}
    models = {
        "text": Model(decoupled=False, config=steps),
        "one": Model(decoupled=False, **inner),
        "two": Model(**inner),
    }
    async with TritonLike(**models) as server, backend(server) as source:
        replica = await replica_of(source)
        assert len([chunk async for chunk in replica.generate(ask()) if chunk.text]) == 4
        assert replica.snapshot().slots == 4


async def test_a_server_that_is_no_triton_is_asked_over_infer() -> None:
    model = Model(inputs={"text_input": "BYTES"})
    async with TritonLike(text=model) as server:
        server.name, server.indexes = "other", False
        async with backend(server, models=[{"served": "text", "variant": "mine", "context_tokens": 500}]) as source:
            replica = await replica_of(source, "mine")
            assert await answer(replica, ask()) == (" w2 w3 w4 w5", FinishReason.STOP, 3)
    assert model.asked[0]["outputs"] == [{"name": "text_output"}]
    assert replica.info.context_tokens == 500


async def test_a_server_that_lists_nothing_says_what_to_configure() -> None:
    async with TritonLike(text=Model()) as server:
        server.indexes = False
        async with backend(server) as source:
            await until(lambda: "[[backends.models]]" in source.unreached)


async def test_the_key_goes_to_the_server_and_not_to_its_metrics() -> None:
    async with TritonLike(text=Model()) as server, backend(server, api_key="s3cret") as source:
        await replica_of(source)
        assert server.keys[-1] == "Bearer s3cret"


async def test_a_conversation_needs_a_template() -> None:
    chat = ChatPrompt((Message("user", "say it"),))

    def renderers(family: str, path: str):
        assert (family, path) == ("text", "/t")
        return lambda prompt, so_far: f"user: {prompt.messages[0].content}\n{so_far}"

    model = Model()
    mine = [{"served": "text", "chat_template": "/t"}]
    async with TritonLike(text=model) as server, backend(server, renderers=renderers, models=mine) as source:
        replica = await replica_of(source)
        assert not {Feature.CHAT, Feature.CONTINUED_CHAT} & replica.info.lacks
        assert (await answer(replica, ask(chat)))[0] == " w3 w4 w5 w6"
    assert model.asked[0]["text_input"] == "user: say it\n"


async def test_a_template_that_cannot_be_read_leaves_completions() -> None:
    def renderers(family: str, path: str):
        raise OverspillError(f"no {family}{path}")

    async with TritonLike(text=Model()) as server:
        with structlog.testing.capture_logs() as logs:
            async with backend(server, renderers=renderers) as source:
                assert Feature.CHAT in (await replica_of(source)).info.lacks
    assert [entry["why"] for entry in logs if entry["event"] == "chat template unusable"] == ["no text"]


async def test_our_own_gateway_is_such_a_server_too() -> None:
    with serving(gateway_deps()) as tier:
        fields = {"name": "ours", "kind": "kserve", "urls": [tier.url], "poll_interval_s": 0.03, "warm_up": False}
        settings = msgspec.convert({**fields, "models": [{"served": "tiny-int8"}]}, BackendSettings)
        (source,) = backend_sources([settings], Surroundings(CLOCK, SourceHooks(), lambda _: None), environ={})
        async with source:
            replica = await replica_of(source, "tiny-int8")
            can = {Feature.TOP_K, Feature.SEED, Feature.PENALTIES, Feature.REPETITION_PENALTY, Feature.IGNORE_EOS}
            assert not replica.info.lacks & (can | {Feature.MIN_P, Feature.MIN_TOKENS})
            assert {Feature.CHAT, Feature.PROMPT_IDS, Feature.LOGPROBS, Feature.LOGIT_BIAS} <= replica.info.lacks
            request = ask("say hello there world", seed=3, top_k=5, stop=("x",), min_p=0.1, min_tokens=2)
            assert await answer(replica, request) == ("hello there world", FinishReason.STOP, 3)
            assert tier.dispatcher.requests[-1].sampling == request.sampling
            assert replica.info.context_tokens == 2048


# ── failures ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_stream_that_breaks_has_told_what_came() -> None:
    model = Model(pause=asyncio.Event())
    async with TritonLike(text=model) as server, backend(server) as source:
        got = []
        with pytest.raises(ReplicaBroken):  # noqa: PT012 - what came before counts
            async for chunk in (await replica_of(source)).generate(ask()):
                got.append(chunk.text)
                if len(got) == 2:
                    server.cut()
        assert got == [" w2", " w3"]


async def test_an_answer_that_is_not_wanted_any_more_is_not_computed_any_more() -> None:
    model = Model(pause=asyncio.Event())
    async with TritonLike(text=model) as server, backend(server) as source:
        stream = (await replica_of(source)).generate(ask())
        assert (await anext(stream)).text == " w2"
        await stream.aclose()
        await until(lambda: model.closed)


async def test_a_stop_string_ends_the_work_there() -> None:
    model = Model(pause=asyncio.Event())
    async with TritonLike(text=model) as server, backend(server) as source:
        assert await answer(await replica_of(source), ask(stop=("w3",))) == (" w2 ", FinishReason.STOP, 2)
        await until(lambda: model.closed)


@pytest.mark.parametrize("decoupled", [True, False])
async def test_a_model_that_fails_is_the_replica_s_fault(decoupled: bool) -> None:
    model = Model(decoupled=decoupled, fails=(400, "out of memory"))
    async with TritonLike(text=model) as server, backend(server) as source:
        with pytest.raises(ReplicaFailed, match="backend triton: out of memory"):
            await answer(await replica_of(source), ask())


# ── loading, and what there is to do ────────────────────────────────────────────────────────────────────────────────


async def test_a_model_that_is_being_loaded_is_a_time_and_not_an_error() -> None:
    model = Model()
    async with TritonLike(text=model, other=Model()) as server, backend(server) as source:
        replica = await replica_of(source)
        model.state = "LOADING"
        await until(lambda: not replica.snapshot().available)
        snapshot = replica.snapshot()
        assert snapshot.why == "text is being loaded"
        assert 1.0 <= snapshot.back_in_s <= 10.0
        assert len(source.replicas) == 2
        model.state = "READY"
        assert await replica_of(source) is replica


async def test_a_server_without_a_ready_model_says_when() -> None:
    model = Model(state="LOADING")
    async with TritonLike(text=model) as server, backend(server, models=[{"served": "text"}]) as source:
        server.ready = 400
        await until(lambda: source.unreached == "text is being loaded")
        model.state, model.reason = "UNAVAILABLE", "out of memory"
        await until(lambda: source.unreached == "text is not loaded there: out of memory")
        model.state = "READY"  # another one of it may keep the server from saying that it is ready
        await replica_of(source)
        assert source.unreached == ""


async def test_a_model_that_is_removed_is_gone() -> None:
    async with TritonLike(text=Model(), other=Model()) as server, backend(server) as source:
        await until(lambda: len(source.replicas) == 2)
        del server.models["other"]
        await until(lambda: [replica.info.variant for replica in source.replicas] == ["text"])


async def test_what_waits_there_and_is_not_ours_is_told() -> None:
    model = Model(pause=asyncio.Event())
    async with TritonLike(text=model) as server, backend(server) as source:
        replica = await replica_of(source)
        assert replica.snapshot().slots == 2
        server.metrics = PENDING.format(5)
        await until(lambda: replica.snapshot().queued == 5)
        streams = [replica.generate(ask()) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        server.metrics = PENDING.format(4)  # one of them is ours
        await until(lambda: replica.snapshot().queued == 4)  # three of others, and ours
        assert replica.snapshot().running == 2
        for stream in streams:
            await stream.aclose()
        server.metrics = PENDING.format(0)
        await until(lambda: (replica.snapshot().running, replica.snapshot().queued) == (0, 0))


async def test_an_llm_backend_tells_what_runs_and_what_room_there_is() -> None:
    async with TritonLike(text=Model()) as server, backend(server) as source:
        labels = [("scheduled", 7), ("waiting", 2)]
        server.metrics = "".join(f'nv_trt_llm_request_metrics{{request_type="{k}"}} {v}\n' for k, v in labels)
        blocks = [("free", 10), ("tokens_per", 64)]
        server.metrics += "".join(
            f'nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="{k}"}} {v}\n' for k, v in blocks
        )
        replica = await replica_of(source)
        await until(lambda: replica.snapshot().running == 7)
        assert (replica.snapshot().queued, replica.snapshot().kv_free_tokens) == (2, 640)


async def test_metrics_without_end_or_packed_do_no_harm() -> None:
    for page in (endless, status(200, b"packed", content_encoding="gzip")):
        async with ForeignServer() as exporter, TritonLike(text=Model()) as server:
            exporter.pages["/metrics"] = page
            kserve = {"metrics_url": exporter.url + "/metrics"}
            async with backend(server, kserve=kserve) as source:
                replica = await replica_of(source)
                assert "".join([chunk.text async for chunk in replica.generate(ask())])


async def test_metrics_that_are_not_there_do_no_harm() -> None:
    async with TritonLike(text=Model()) as server, backend(server, kserve={"metrics_url": ":1/metrics"}) as source:
        assert (await replica_of(source)).snapshot().slots == 2


async def test_its_speed_is_measured_over_completions() -> None:
    model = Model()
    async with TritonLike(text=model) as server, backend(server, warm_up=True) as source:
        replica = await replica_of(source)
    assert replica.info.prior.source.startswith("measured: ")
    assert len(model.asked) == 7


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"kind": "openai"}, r"\[backends.kserve\] is for kind `kserve`"),
        ({"kserve": {"spelling": {"max_token": "x"}}}, r"'max_token' is no sampling parameter"),
        ({"kserve": {"metrics_url": "8002"}}, r"`metrics_url`: .*`:8002/metrics`"),
        ({"kserve": {"metrics_url": "http://a:b@c/m"}}, r"`metrics_url`"),
        ({"kserve": {"endpoint": "generate_stram"}}, r"endpoint"),
    ],
)
def test_settings_that_cannot_be_are_named(given: dict[str, Any], named: str) -> None:
    fields = {"name": "t", "kind": "kserve", "urls": ["http://h:1"], "kserve": {"echoes": True}, **given}
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.convert(fields, BackendSettings)
