"""The client to an upstream tier against the real gateway on a real uvicorn, and against sockets that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import structlog

from router.base.clock import MonotonicClock
from router.base.errors import (
    ConfigError,
    ContextTooLong,
    DeadlineLost,
    InvalidRequest,
    ModelNotFound,
    OverspillError,
    Refused,
    ReplicaBroken,
    ReplicaFailed,
    ReplicaUnreachable,
    Shed,
    Unavailable,
)
from router.dispatch.dispatcher import Dispatcher
from router.signals.link import Link, LinkPrior
from router.upstream.servers.polled import ServerOptions
from router.upstream.servers.tier import TOKEN_BYTES, UpstreamTier
from router.upstream.source import SourceHooks
from router.values.chunk import FinishReason, TokenChunk
from router.values.feature import Feature
from router.values.prompt import ChatPrompt, Message, TextPrompt, TokenPrompt
from router.values.replica import ReplicaSnapshot, SpeedPrior
from router.values.request import InferenceRequest, Locality, Objective
from router.values.sampling import SamplingParams
from router.values.settings import BreakerSettings, RouterSettings
from router.wire.load import LoadReport, VariantLoad
from tests.support.gateway_fakes import FAMILY, FakeDispatcher, Server, gateway_deps, replica_info, serving
from tests.support.ports import unused_port
from tests.support.waiting import until

CLOCK = MonotonicClock()
FAST = ServerOptions(poll_interval_s=0.03, connect_timeout_s=1.0, probe_timeout_s=2.0)


def ask(text: str = "say hello there world", **changes) -> InferenceRequest:
    fields = {
        "request_id": "r-1",
        "model": FAMILY,
        "prompt": ChatPrompt((Message("system", "be brief"), Message("user", text))),
        "sampling": SamplingParams(temperature=0.0),
        "objective": Objective(),
        "prompt_tokens": 7,
        "accepted_at_s": CLOCK.now_s(),
    }
    return InferenceRequest(**{**fields, **changes})


@pytest.fixture(scope="module")
def shared_server():
    with serving(gateway_deps(max_priority=5)) as running:
        yield running


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.dispatcher.forget()
    return shared_server


@contextlib.asynccontextmanager
async def upstream(
    url: str, hooks: SourceHooks | None = None, *, link: Link | None = None, **options
) -> AsyncIterator[UpstreamTier]:
    link = link or Link(url)
    async with UpstreamTier(url, link=link, clock=CLOCK, options=replace(FAST, **options), hooks=hooks) as tier:
        yield tier


async def best(tier: UpstreamTier):
    await until(lambda: tier.replicas and tier.replicas[0].snapshot().available)
    return tier.replicas[0]


async def everything(replica, request: InferenceRequest):
    return [chunk async for chunk in replica.generate(request)]


async def texts_until(error: type, replica, request: InferenceRequest) -> tuple[list[str], OverspillError]:
    """Return what was emitted before the error, and the error."""
    got = []
    try:
        async for chunk in replica.generate(request):
            got.append(chunk.text)  # noqa: PERF401 - what came before the error counts
    except error as raised:
        return got, raised
    raise AssertionError(f"no {error.__name__} after {got}")


@contextlib.asynccontextmanager
async def raw_server(handler) -> AsyncIterator[str]:
    """A server that answers bytes of its own choice, to be worse than any real one."""
    tasks: set[asyncio.Task] = set()
    transports: list[asyncio.WriteTransport] = []

    async def run(reader, writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        transports.append(writer.transport)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            await handler(head, reader, writer)
        writer.close()

    listening = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in transports:  # also one whose caller left without a word, or did not read to the end
            transport.abort()
        await asyncio.sleep(0)


HEALTH = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nendpoint-load-metrics: "
    b'JSON {"named_metrics":{"tiny-fp32|available":1,"tiny-fp32|slots":2}}\r\nconnection: close\r\n\r\n{}'
)
CARDS = (
    b'{"data":[{"id":"tiny-fp32","overspill":{"kind":"variant","family":"tiny","variant":"tiny-fp32","rung":0,'
    b'"quality":1,"context_tokens":512,"tier":"cloud","prior":{"prefill_tokens_per_s":1,"decode_tokens_per_s":1}}}]}'
)
MODELS = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(CARDS), CARDS)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


def event(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % text.encode()


def scripted(generation):
    """Answer probes like a gateway, and POSTs with `generation(writer)`."""

    async def handler(head: bytes, reader, writer) -> None:
        if head.startswith(b"GET /health/ready"):
            writer.write(HEALTH)
        elif head.startswith(b"GET /v1/models"):
            writer.write(MODELS)
        else:
            await generation(reader, writer)
        await writer.drain()

    return handler


async def test_rungs_are_discovered_with_everything_the_router_needs(server: Server) -> None:
    changes = []
    async with upstream(server.url, SourceHooks(on_change=lambda: changes.append(1))) as tier:
        replica = await best(tier)
        assert [r.info.variant for r in tier.replicas] == ["tiny-fp32", "tiny-int8"]
        expected = replica_info(
            "tiny-fp32",
            0,
            replica_id="cloud/tiny-fp32",
            endpoint=server.url,
            tier="cloud",
            remote=True,
            device=f"{server.url} local",
            offers=frozenset({Feature.TOKENIZE}),
        )
        assert replica.info == expected
        assert replica.link is tier.link.snapshot(warm=False), "no request has opened a connection yet"
        assert changes == [1]
        snapshot = replica.snapshot()
        assert (snapshot.slots, snapshot.running, snapshot.why) == (4, 1, "")


async def test_an_answer_arrives_token_by_token_with_its_origin(server: Server) -> None:
    async with upstream(server.url) as tier:
        replica = await best(tier)
        chunks = await everything(replica, ask())
    assert "".join(chunk.text for chunk in chunks) == "hello there world"
    assert [chunk.tokens for chunk in chunks if chunk.text] == [1, 1, 1]
    assert chunks[0].origin is not None
    assert (chunks[0].origin.variant, chunks[0].origin.rung, chunks[0].origin.tier) == ("tiny-fp32", 1, "cloud")
    assert chunks[0].origin.degraded
    assert all(chunk.origin is None for chunk in chunks[1:])
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert chunks[-1].prompt_tokens == 8  # two messages, six words


async def test_the_exact_variant_and_every_parameter_travel(server: Server) -> None:
    sampling = SamplingParams(
        max_tokens=20,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        seed=5,
        stop=("\n", "END"),
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.1,
        ignore_eos=True,
    )
    async with upstream(server.url) as tier:
        replica = await best(tier)
        await everything(replica, ask(sampling=sampling))
        await everything(replica, ask(prompt=TextPrompt("say a"), sampling=sampling))
        await everything(replica, ask(prompt=TokenPrompt((1, 2, 3)), sampling=sampling))
    seen = server.dispatcher.requests
    assert [r.sampling for r in seen] == [sampling] * 3
    assert [r.model for r in seen] == ["tiny-fp32"] * 3
    assert [r.prompt for r in seen][1:] == [TextPrompt("say a"), TokenPrompt((1, 2, 3))]
    assert seen[0].request_id == "r-1"


async def test_a_text_answer_without_bound_may_fill_the_window(server: Server) -> None:
    async with upstream(server.url) as tier:
        await everything(await best(tier), ask(prompt=TextPrompt("say a")))
    assert server.dispatcher.requests[0].sampling.max_tokens == 2048 - 7


@pytest.mark.parametrize("prompt", [None, TextPrompt("say more of it")])
async def test_a_continuation_travels_and_is_not_counted_as_prompt(server: Server, prompt) -> None:
    changes: dict[str, Any] = {
        "continuation": "Paris is",
        "continuation_tokens": 2,
        "sampling": SamplingParams(max_tokens=10),
    }
    if prompt is not None:
        changes["prompt"] = prompt
    async with upstream(server.url) as tier:
        chunks = await everything(await best(tier), ask(**changes))
    seen = server.dispatcher.requests[0]
    assert seen.continuation == "Paris is"
    assert seen.sampling.max_tokens == 8
    assert seen.prompt == ask(**changes).prompt
    assert chunks[-1].prompt_tokens is None


async def test_nothing_is_sent_when_no_token_is_left(server: Server) -> None:
    request = ask(continuation="Paris", continuation_tokens=5, sampling=SamplingParams(max_tokens=5))
    async with upstream(server.url) as tier:
        chunks = await everything(await best(tier), request)
    assert [(c.text, c.finish_reason) for c in chunks] == [("", FinishReason.LENGTH)]
    assert server.dispatcher.requests == []


async def test_the_remaining_objective_and_the_trace_travel(server: Server) -> None:
    objective = Objective(ttft_s=2.0, tpot_s=0.25, deadline_s=30.0, priority=3, min_quality=0.5, session="s 1")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    request = ask(objective=objective, accepted_at_s=CLOCK.now_s() - 1.0, headers=(("traceparent", trace),))
    async with upstream(server.url) as tier:
        await everything(await best(tier), request)
    seen = server.dispatcher.requests[0]
    assert 0 < seen.objective.ttft_s < 1.0
    assert 20 < seen.objective.deadline_s < 29.0
    assert (seen.objective.tpot_s, seen.objective.priority) == (0.25, 3)
    assert (seen.objective.min_quality, seen.objective.session) == (0.5, "s 1")
    assert dict(seen.headers) == {"traceparent": trace, "x-overspill-hops": "1"}


async def test_a_lost_ttft_is_left_out_and_a_lost_deadline_refused(server: Server) -> None:
    long_ago = CLOCK.now_s() - 10
    async with upstream(server.url) as tier:
        replica = await best(tier)
        await everything(replica, ask(objective=Objective(ttft_s=1.0), accepted_at_s=long_ago))
        with pytest.raises(DeadlineLost):
            await everything(replica, ask(objective=Objective(deadline_s=5.0), accepted_at_s=long_ago))
        with pytest.raises(InvalidRequest, match="local-only"):
            await everything(replica, ask(objective=Objective(locality=Locality.LOCAL_ONLY)))
    assert [r.objective.ttft_s for r in server.dispatcher.requests] == [None]


@pytest.mark.parametrize(
    ("text", "error", "after_s"),
    [
        ("refuse shed", Shed, 0.25),
        ("refuse unavailable", Unavailable, 7.2),
        ("refuse deadline", DeadlineLost, 1.0),
        ("refuse long", ContextTooLong, None),
        ("crash", ReplicaFailed, None),
        ("break-first", ReplicaFailed, None),
        ("break", ReplicaBroken, None),
        ("bug", ReplicaBroken, None),
        ("silent", ReplicaBroken, None),
    ],
)
async def test_errors_keep_their_meaning(server: Server, text: str, error: type, after_s: float | None) -> None:
    async with upstream(server.url) as tier:
        replica = await best(tier)
        got, raised = await texts_until(error, replica, ask(text))
        assert not replica._running
    assert type(raised) is error
    if after_s is not None:
        assert isinstance(raised, Refused)
        assert raised.retry_after_s == after_s
    assert bool(got) == (error is ReplicaBroken)


async def test_a_model_that_the_upstream_dropped_is_not_found(server: Server) -> None:
    async with upstream(server.url) as tier:
        replica = await best(tier)
        replica.info = replica_info("gone")
        with pytest.raises(ModelNotFound):
            await everything(replica, ask())


async def test_a_wrong_key_is_the_upstreams_problem_not_the_callers() -> None:
    with serving(gateway_deps(api_keys={"right": 0})) as server:
        async with upstream(server.url, api_key="wrong") as tier:
            await until(lambda: "API key" in tier.condition.why)
            assert tier.replicas == []
        async with upstream(server.url, api_key="right") as tier:
            await everything(await best(tier), ask())


async def test_closing_the_generator_ends_the_work_upstream(server: Server) -> None:
    async with upstream(server.url) as tier:
        replica = await best(tier)
        chunks = replica.generate(ask("forever", request_id="left"))
        assert (await anext(chunks)).text
        assert len(replica._running) == 1
        await chunks.aclose()
        assert not replica._running
        assert await asyncio.to_thread(server.dispatcher.wait_closed, "left")


async def test_cancelling_before_the_first_token_ends_the_work_upstream(server: Server) -> None:
    async with upstream(server.url) as tier:
        replica = await best(tier)
        task = asyncio.create_task(everything(replica, ask("hang", request_id="cancelled")))
        await until(lambda: server.dispatcher.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.dispatcher.wait_cancelled, "cancelled")


async def test_an_upstream_may_come_later_go_and_come_back() -> None:
    port = unused_port()
    good, bad = [], []
    hooks = SourceHooks(probe_succeeded=good.append, probe_failed=lambda endpoint, why: bad.append((endpoint, why)))
    async with upstream(f"http://127.0.0.1:{port}", hooks) as tier:
        await until(lambda: bad)
        assert tier.replicas == []
        assert bad[0][0] == tier.endpoint
        server = await asyncio.to_thread(Server(gateway_deps(), port).start)
        try:
            replica = await best(tier)
            assert good
        finally:
            await asyncio.to_thread(server.stop)
        await until(lambda: not replica.snapshot().available)
        assert "unreachable" in replica.snapshot().why
        assert tier.replicas[0] is replica, "last known rungs are kept"
        with pytest.raises(ReplicaUnreachable):
            await everything(replica, ask())
        again = await asyncio.to_thread(Server(gateway_deps(), port).start)
        try:
            assert await best(tier) is replica
            assert "".join(chunk.text for chunk in await everything(replica, ask())) == "hello there world"
        finally:
            await asyncio.to_thread(again.stop)


async def test_an_absent_upstream_is_told_of_once() -> None:
    port = unused_port()
    bad: list[str] = []
    hooks = SourceHooks(probe_failed=lambda _, why: bad.append(why))
    with structlog.testing.capture_logs() as logs:
        async with upstream(f"http://127.0.0.1:{port}", hooks) as tier:
            for _ in range(2):
                await until(lambda: len(bad) > 8)
                told = [log["why"] for log in logs if log["event"] == "upstream unreachable"]
                assert told, "an absence is told of"
                assert len(told) == len(set(told)), "each reason once"
                assert set(told) <= set(bad)
                server = await asyncio.to_thread(Server(gateway_deps(), port).start)
                await best(tier)
                bad.clear()
                logs.clear()
                await asyncio.to_thread(server.stop)


async def test_not_ready_is_reachable_but_takes_nothing() -> None:
    closed = ["draining"]
    with serving(gateway_deps(closed=lambda: closed[0])) as server:
        async with upstream(server.url) as tier:
            await until(lambda: tier.replicas)
            await until(lambda: tier.condition.reachable)
            assert "draining" in tier.replicas[0].snapshot().why
            with pytest.raises(Unavailable) as raised:
                await everything(tier.replicas[0], ask())
            assert raised.value.retry_after_s == 1.0
            closed[0] = ""
            await best(tier)


async def test_rungs_that_change_are_taken_over() -> None:
    infos = [replica_info("tiny-fp32", 0)]
    dispatcher = FakeDispatcher()
    changes = []
    with serving(gateway_deps(dispatcher, models=lambda: infos)) as server:
        async with upstream(server.url, SourceHooks(on_change=lambda: changes.append(1))) as tier:
            kept = await best(tier)
            new = replica_info("tiny-new", 1)
            dispatcher.snapshots = [ReplicaSnapshot(i, available=True, slots=1) for i in (*infos, new)]
            infos.append(new)
            await until(lambda: len(tier.replicas) == 2)
            assert tier.replicas[0] is kept
            await until(lambda: len(changes) == 2)


class HastyClock(MonotonicClock):
    """The real time, and `ahead_s` more."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


@pytest.mark.parametrize("waits", [False, True])
async def test_an_upstream_that_nobody_used_is_polled_again_once_a_request_goes_there(
    server: Server, *, waits: bool
) -> None:
    clock, polls = HastyClock(), 0

    def polled(_: str) -> None:
        nonlocal polls
        polls += 1

    options = replace(FAST, idle_poll_interval_s=3000.0)
    hooks = SourceHooks(probe_succeeded=polled)
    async with UpstreamTier(server.url, link=Link(server.url), clock=clock, options=options, hooks=hooks) as tier:
        await until(lambda: polls > 2)
        clock.ahead_s = 100.0
        seen = -1
        while polls != seen:  # ten usual pauses without one
            seen = polls
            await asyncio.sleep(10 * FAST.poll_interval_s)
        if waits:
            tier.wanted()
        else:
            assert [chunk async for chunk in tier.replicas[0].generate(ask())]
        await until(lambda: polls > seen + 2)  # the next would be due in 45 minutes


async def test_what_was_sent_since_the_report_counts(server: Server) -> None:
    async with upstream(server.url, poll_interval_s=60) as tier:
        replica = await best(tier)
        before = replica.snapshot()
        running = [replica.generate(ask("stall", sampling=SamplingParams(max_tokens=50))) for _ in range(2)]
        tasks = [asyncio.ensure_future(anext(chunks)) for chunks in running]
        await asyncio.sleep(0)  # sent, and no answer yet
        during = replica.snapshot()
        assert during.running == before.running + 2
        assert during.queued_prefill_tokens == 14
        assert during.pending_decode_tokens == 100
        await asyncio.gather(*tasks)
        for chunks in running:
            await chunks.aclose()
        after = replica.snapshot()
        assert after.running <= during.running
        assert after.age_s >= 0


async def test_the_queue_of_the_upstream_counts_for_each_of_its_rungs(server: Server) -> None:
    server.dispatcher.waiting = 3
    try:
        async with upstream(server.url) as tier:
            assert (await best(tier)).snapshot().queued == 3
    finally:
        server.dispatcher.waiting = 0


async def test_a_stream_cut_in_the_middle_is_broken() -> None:
    async def cut(reader, writer) -> None:
        writer.write(STREAM_HEAD + event("one") + event("two"))
        await writer.drain()
        writer.transport.abort()

    async with raw_server(scripted(cut)) as url, upstream(url) as tier:
        got, _ = await texts_until(ReplicaBroken, await best(tier), ask())
    assert got == ["one", "two"]


async def test_a_half_open_stream_lets_go_when_the_dispatcher_gives_it_up() -> None:
    gone = asyncio.Event()

    async def freeze(reader, writer) -> None:
        writer.write(STREAM_HEAD + event("one"))
        await writer.drain()
        while await reader.read(1024):  # the rest of the request, then the end of the connection
            pass
        gone.set()

    async with raw_server(scripted(freeze)) as url, upstream(url) as tier:
        chunks = (await best(tier)).generate(ask())
        assert (await anext(chunks)).text == "one"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(chunks), 0.1)
        await chunks.aclose()
        await asyncio.wait_for(gone.wait(), 30)
        assert tier.replicas[0].snapshot().running == 0


@pytest.mark.parametrize(("deadline_s", "state"), [(0.2, "closed"), (1.3, "open")])
async def test_a_server_that_never_answers_is_lost_at_the_deadline_and_only_long_silence_is_its_fault(
    deadline_s: float, state: str
) -> None:
    """A caller chooses its deadline: short ones, however many, close the upstream for nobody."""

    async def freeze(reader, writer) -> None:
        await asyncio.sleep(60)

    settings = RouterSettings(breaker=BreakerSettings(failures=1))
    async with raw_server(scripted(freeze)) as url, upstream(url) as tier:
        replica = await best(tier)
        replica.info = replace(replica.info, prior=SpeedPrior(1000.0, 100.0))
        tier.link.observe_rtt(0.001)
        async with Dispatcher([replica], settings, clock=CLOCK) as dispatcher:
            began_s = CLOCK.now_s()
            request = ask(objective=Objective(deadline_s=deadline_s), sampling=SamplingParams(max_tokens=1))
            with pytest.raises(DeadlineLost):
                await asyncio.wait_for(dispatcher.start(request), 30)
            assert CLOCK.now_s() - began_s >= deadline_s
            await until(lambda: dispatcher.breaker_states()[url] == state)  # the self-test is silent too


async def test_silent_probes_end_streams_that_would_wait_for_long() -> None:
    frozen = asyncio.Event()

    async def handler(head: bytes, reader, writer) -> None:
        if head.startswith(b"POST"):
            writer.write(STREAM_HEAD + event("one"))
            await writer.drain()
            await asyncio.sleep(60)
        if frozen.is_set():
            await asyncio.sleep(60)
        writer.write(HEALTH if b"/health/ready" in head else MODELS)
        await writer.drain()

    async with raw_server(handler) as url, upstream(url, probe_timeout_s=0.1) as tier:
        chunks = (await best(tier)).generate(ask())
        assert (await anext(chunks)).text == "one"
        frozen.set()
        with pytest.raises(ReplicaBroken, match="no answer to a probe"):
            await anext(chunks)
        assert not tier.replicas[0].snapshot().available


@pytest.mark.parametrize(("words", "alone"), [(40, True), (3, False)], ids=["much", "little"])
async def test_of_much_that_came_at_once_the_beginning_goes_on_before_the_rest_is_parsed(
    *, words: int, alone: bool
) -> None:
    async def burst(reader, writer) -> None:
        events = [*(event(f"w{index} ") for index in range(words)), FINISH]
        head = STREAM_HEAD.replace(b"connection: close", b"transfer-encoding: chunked")
        writer.write(head + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events) + b"0\r\n\r\n")

    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    async with raw_server(scripted(burst)) as url, upstream(url) as tier:
        chunks = (await best(tier)).generate(ask())
        got = [await anext(chunks)]
        asyncio.get_running_loop().call_soon(turn)
        while got[-1].finish_reason is None:
            got.append(await anext(chunks))
        assert turns == alone
        await chunks.aclose()
    assert [chunk.text for chunk in got] == [*(f"w{index} " for index in range(words)), ""]
    assert got[-1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("takes", [True, False])
async def test_what_came_at_once_is_given_on_at_once_but_for_the_last_of_it(*, takes: bool) -> None:
    words = [f"w{index} " for index in range(40)]
    told: list[str] = []
    given = 0

    def give(chunks: list[TokenChunk]) -> bool:
        nonlocal given
        if takes:
            told.extend(chunk.text for chunk in chunks)
            given += 1
        return takes

    async def burst(reader, writer) -> None:
        head = STREAM_HEAD.replace(b"connection: close", b"transfer-encoding: chunked")
        events = [*map(event, words), FINISH]
        writer.write(head + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in events) + b"0\r\n\r\n")

    async with raw_server(scripted(burst)) as url, upstream(url) as tier:
        replica = await best(tier)
        read = []
        async for chunk in replica.push(ask(), give):
            read.append(chunk)
            told.append(chunk.text)
        assert replica.chunks_received == 41
        assert not replica.busy
    assert told == [*words, ""], "in their order, whichever way each went"
    assert [chunk.text for chunk in read][-2:] == [words[-1], ""], "an answer may end with its last text"
    assert read[-1].finish_reason is FinishReason.STOP
    assert (given > 0, len(read) < 10) == (takes, takes)


async def test_events_of_other_servers_are_understood() -> None:
    """No usage while it runs, CRLF, comments, empty deltas, text in the last chunk, usage at the end."""

    async def other(reader, writer) -> None:
        writer.write(
            STREAM_HEAD
            + b": ping\r\n\r\n"
            + b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"x":1}\r\n\r\n'
            + b'data:{"choices":[{"index":0,"delta":{"content":"on'
        )
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(
            b'e"}}]}\r\n\r\n'
            b'data: {"choices":[{"index":0,"delta":{"content":" two"},"finish_reason":"length"}]}\n\n'
            b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":5,'
            b'"prompt_tokens_details":{"cached_tokens":4}}}\n\ndata: [DONE]\n\n'
        )

    async with raw_server(scripted(other)) as url, upstream(url) as tier:
        chunks = await everything(await best(tier), ask())
    assert [(c.text, c.tokens, c.finish_reason) for c in chunks] == [
        ("one", 1, None),
        (" two", 4, FinishReason.LENGTH),
    ]
    assert chunks[-1].prompt_tokens == 9
    assert [chunk.cached_tokens for chunk in chunks] == [None, 4]
    assert chunks[0].origin is None


async def test_an_end_that_came_with_the_last_text_is_told_by_it() -> None:
    usage = b'"prompt_tokens":9,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4,"audio_tokens":2}'

    async def at_once(reader, writer) -> None:
        told = b'data: {"choices":[],"usage":{' + usage + b"}}\n\ndata: [DONE]\n\n"
        body = event("one") + event(" two") + FINISH + told
        length = b"content-length: %d" % len(body)
        writer.write(STREAM_HEAD.replace(b"connection: close", length) + body)

    async with raw_server(scripted(at_once)) as url, upstream(url) as tier:
        chunks = await everything(await best(tier), ask())
    assert [(c.text, c.tokens, c.finish_reason) for c in chunks] == [
        ("one", 1, None),
        (" two", 4, FinishReason.STOP),
    ]
    last = chunks[-1]
    assert (last.prompt_tokens, last.cached_tokens) == (9, 4)
    assert last.details is not None
    assert last.details.prompt == {"audio_tokens": 2}


@pytest.mark.parametrize(
    "changes",
    [{"headers": (("tracestate", "a\r\nb"),)}, {"prompt": TextPrompt("\ud800")}],
    ids=["header", "text"],
)
async def test_a_request_that_cannot_be_written_down_is_its_own_fault(server: Server, changes: dict) -> None:
    """Crack 4: what a request holds said of the upstream that it cannot be reached."""
    async with upstream(server.url) as tier:
        replica = await best(tier)
        with pytest.raises(InvalidRequest):
            await everything(replica, ask(**changes))
        with pytest.raises(InvalidRequest, match="tracestate"):
            await everything(replica, ask(headers=(("tracestate", "k=\u00e9\u6f22"),)))
        assert replica.snapshot().available


async def test_an_impossible_usage_is_not_believed() -> None:
    """Crack 6: 10^29 tokens poisoned what was learnt of lengths, and no JSON can say it."""

    async def lies(reader, writer) -> None:
        usage = b'"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % (10**18, 10**18)
        for text in ("one", " two"):
            writer.write(
                event(text).replace(b"}]}\n\n", b"}]," + usage) if text != "one" else STREAM_HEAD + event(text)
            )
        writer.write(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],' + usage + b"data: [DONE]\n\n")

    async with raw_server(scripted(lies)) as url, upstream(url) as tier:
        chunks = await everything(await best(tier), ask(sampling=SamplingParams(max_tokens=8)))
    assert [(c.text, c.tokens) for c in chunks if c.text] == [("one", 1), (" two", 1)]
    assert sum(chunk.tokens for chunk in chunks) == 2
    assert {chunk.prompt_tokens for chunk in chunks} == {None}


async def test_an_upstream_that_does_not_close_a_finished_stream_holds_nobody() -> None:
    async def open_end(reader, writer) -> None:
        writer.write(
            STREAM_HEAD + event("one") + b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        )
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        await asyncio.sleep(60)

    async with raw_server(scripted(open_end)) as url, upstream(url) as tier:
        chunks = await asyncio.wait_for(everything(await best(tier), ask()), 60)
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_an_answer_with_its_finish_reason_is_whole_without_an_end_mark() -> None:
    """Crack 6: a server that kept the connection open after the finish reason lost the answer, 20 s later."""

    async def no_end_mark(reader, writer) -> None:
        writer.write(
            STREAM_HEAD + event("one") + b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        )
        await writer.drain()
        await asyncio.sleep(60)

    async with raw_server(scripted(no_end_mark)) as url, upstream(url) as tier:
        chunks = await asyncio.wait_for(everything(await best(tier), ask()), 60)
    assert [c.text for c in chunks] == ["one", ""]
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_garbage_is_broken_not_swallowed() -> None:
    async def garbage(reader, writer) -> None:
        writer.write(STREAM_HEAD + event("one") + b"data: <html>\n\n")

    async with raw_server(scripted(garbage)) as url, upstream(url) as tier:
        with pytest.raises(ReplicaBroken, match="no completion chunk"):
            await everything(await best(tier), ask())


SLOW = LinkPrior(uplink_bytes_per_s=30_000.0)


@pytest.mark.parametrize(("prior", "encoding"), [(SLOW, b"gzip"), (None, b"")])
async def test_a_long_prompt_goes_compressed_over_a_slow_uplink_alone(prior: LinkPrior | None, encoding: bytes) -> None:
    heads: list[bytes] = []
    bodies: list[bytes] = []

    async def noted(head: bytes, reader, writer) -> None:
        if head.startswith(b"POST"):
            heads.append(head)
            bodies.append(await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])))
        await scripted(answered)(head, reader, writer)

    async def answered(_, writer) -> None:
        writer.write(STREAM_HEAD + event("one") + FINISH + b"data: [DONE]\n\n")

    text = "a long context, " * 2000
    async with raw_server(noted) as url, upstream(url, link=Link(url, prior)) as tier:
        for asked in ("short", text):
            assert (await everything(await best(tier), ask(asked)))[0].text == "one"
    assert [b"content-encoding: gzip" in head for head in heads] == [False, bool(encoding)]
    read = gzip.decompress(bodies[1]) if encoding else bodies[1]
    assert text in read.decode()
    assert not encoding or len(bodies[1]) < len(text) / 2


async def test_a_compressed_prompt_arrives_as_it_was(server: Server) -> None:
    text = "say äöü 😀 " * 1000
    async with upstream(server.url, link=Link(server.url, SLOW)) as tier:
        await everything(await best(tier), ask(text))
    assert server.dispatcher.requests[0].prompt.messages[1].content == text


async def test_real_exchanges_teach_the_link(server: Server) -> None:
    async with upstream(server.url) as tier:
        replica = await best(tier)
        await everything(replica, ask("say " + "x" * 400_000))
        assert tier.link.snapshot().rtt_s < 1.0


async def test_a_token_of_an_answer_takes_little_of_the_network(server: Server) -> None:
    link = Link(server.url, LinkPrior(token_bytes=TOKEN_BYTES))
    async with upstream(server.url, link=link) as tier:
        chunks = await everything(await best(tier), ask("say " + "word " * 100))
    assert sum(chunk.tokens for chunk in chunks) == 100
    assert link.snapshot().token_bytes < 1.1 * TOKEN_BYTES, "an event of 40 bytes, and the headers around it"


async def test_the_time_an_upstream_spends_itself_is_not_the_links() -> None:
    async def slow(reader, writer) -> None:
        head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nserver-timing: tokenize;dur=50.5, first-token;dur=149000\r\n\r\n")
        writer.write(head + event("one") + b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n')

    class Recorder(Link):
        seen: tuple[int, float] = (0, 1.0)

        def observe_transfer(self, sent_bytes: int, took_s: float, body_bytes: int = 0) -> None:
            self.seen = (sent_bytes, took_s)

    link = Recorder("upstream")
    async with raw_server(scripted(slow)) as url, upstream(url, link=link) as tier:
        await everything(await best(tier), ask("x" * 30_000))
    assert link.seen[0] > 30_000
    assert link.seen[1] < 0, "the upstream says it spent more than passed, and the round trip comes off too"


async def test_a_hook_that_fails_does_not_end_the_polling(server: Server) -> None:
    calls = []

    def fails(endpoint: str) -> None:
        calls.append(endpoint)
        raise ZeroDivisionError

    async with upstream(server.url, SourceHooks(probe_succeeded=fails)):
        await until(lambda: len(calls) > 2)


@pytest.mark.parametrize("url", ["cloud:8700", "ftp://cloud", "http://", "http://a:b", ""])
def test_a_wrong_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="upstream"):
        UpstreamTier(url, link=Link("upstream"), clock=CLOCK)


def test_a_wrong_tls_file_is_a_config_error(tmp_path) -> None:
    missing = ServerOptions(ca_file=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match=r"none\.pem"):
        UpstreamTier("https://cloud", link=Link("upstream"), clock=CLOCK, options=missing)


@pytest.mark.parametrize(
    "url",
    [
        "https://alice:hunter2@cloud:8700",
        "https://hunter2@cloud",
        "https://a:hunter2/x@cloud",
        "https://c/?key=hunter2",
    ],
)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"upstream\.api_key") as raised:
        UpstreamTier(url, link=Link("cloud"), clock=MonotonicClock())
    assert "hunter2" not in str(raised.value)
    assert raised.value.param == "upstream.url"


async def test_an_older_report_never_replaces_a_newer_one(server: Server) -> None:
    """A poll that was asked for before an answer began may return after the answer has told the load."""
    async with upstream(server.url, poll_interval_s=3600) as tier:
        replica = await best(tier)
        now_s = tier.clock.now_s()
        for running, at_s in ((8, now_s), (0, now_s - 1.0)):
            load = VariantLoad(replica.info.variant, available=True, slots=8, running=running)
            replica.report(LoadReport((load,)), at_s)
            assert replica.snapshot().running == 8
        replica.report(LoadReport((VariantLoad(replica.info.variant, available=True, slots=8),)), now_s)
        assert replica.snapshot().running == 0


def faulty_probes(faults: list[str], seen: list[str], generation=None):
    """Answer probes like a gateway, but for those that find a fault at the front of `faults`."""

    async def handler(head: bytes, reader, writer) -> None:
        if head.startswith(b"POST"):
            await generation(reader, writer)
        elif b"/health/ready" in head and faults:
            fault = faults.pop(0)
            seen.append(fault)
            if fault == "silent":
                await asyncio.sleep(60)
            if fault == "500":
                writer.write(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        else:
            seen.append("good")
            writer.write(HEALTH if b"/health/ready" in head else MODELS)
        await writer.drain()

    return handler


@pytest.mark.parametrize("fault", ["silent", "500", "cut"])
async def test_a_single_missed_probe_is_no_verdict(fault: str) -> None:
    faults, seen = [], []
    async with raw_server(faulty_probes(faults, seen)) as url, upstream(url, probe_timeout_s=0.1) as tier:
        replica = await best(tier)
        for _ in range(2):
            faults[:] = [fault, fault]
            seen.clear()
            await until(lambda: seen[:2] == [fault, fault] and (replica.snapshot().available and "good" in seen))
            await until(lambda: tier._missed_probes == 0)
        assert tier.condition.reachable


async def test_as_many_missed_probes_as_open_the_breaker_make_it_unavailable() -> None:
    faults, seen, missed = [], [], []
    hooks = SourceHooks(probe_failed=lambda _, why: missed.append(why), misses_to_be_lost=lambda: 4)
    async with raw_server(faulty_probes(faults, seen)) as url, upstream(url, hooks) as tier:
        replica = await best(tier)
        faults[:] = ["500"] * 40
        await until(lambda: len(missed) == 3)
        assert replica.snapshot().available
        await until(lambda: not replica.snapshot().available)
        assert len(missed) == 4
        assert "unreachable" in replica.snapshot().why
        faults.clear()
        await best(tier)


async def test_a_refused_connection_is_confirmed_at_a_tenth_of_the_interval() -> None:
    server = await asyncio.to_thread(Server(gateway_deps()).start)
    async with upstream(server.url, poll_interval_s=10.0) as tier:
        replica = await best(tier)
        await asyncio.to_thread(server.stop)
        tier.doubt()
        began_s = CLOCK.now_s()
        await until(lambda: not replica.snapshot().available)
        assert CLOCK.now_s() - began_s < 10.0


async def test_live_traffic_is_reachability_whatever_probes_say() -> None:
    faults, seen, missed = [], [], []

    async def talk(reader, writer) -> None:
        writer.write(STREAM_HEAD)
        for _ in range(100):
            writer.write(event("one"))
            await writer.drain()
            await asyncio.sleep(0.01)

    hooks = SourceHooks(probe_failed=lambda _, why: missed.append(why))
    handler = faulty_probes(faults, seen, talk)
    async with raw_server(handler) as url, upstream(url, hooks, probe_timeout_s=0.1, poll_interval_s=0.01) as tier:
        chunks = (await best(tier)).generate(ask(sampling=SamplingParams(max_tokens=200)))
        await anext(chunks)
        faults[:] = ["silent"] * 5
        for _ in range(60):
            await anext(chunks)
        assert seen.count("silent") >= 2
        assert tier.replicas[0].snapshot().available
        assert missed == []
        await chunks.aclose()


async def test_one_silent_probe_ends_no_stream() -> None:
    faults, seen = [], []
    go_on = asyncio.Event()

    async def pauses(reader, writer) -> None:
        writer.write(STREAM_HEAD + event("one"))
        await writer.drain()
        await go_on.wait()
        writer.write(b'data: {"choices":[{"index":0,"delta":{"content":" two"},"finish_reason":"stop"}]}\n\n')

    handler = faulty_probes(faults, seen, pauses)
    async with raw_server(handler) as url, upstream(url, probe_timeout_s=0.1) as tier:
        chunks = (await best(tier)).generate(ask())
        assert (await anext(chunks)).text == "one"
        faults[:] = ["silent", "silent"]
        seen.clear()
        await until(lambda: seen[:2] == ["silent", "silent"] and "good" in seen)
        go_on.set()
        assert (await anext(chunks)).text == " two"
        await chunks.aclose()


async def test_one_unreadable_card_leaves_the_other_rungs() -> None:
    good = CARDS[len(b'{"data":[') : -2]
    bad = [
        good.replace(b'"quality":1', b'"quality":7'),
        good.replace(b'"prefill_tokens_per_s":1', b'"prefill_tokens_per_s":1e999'),
        good.replace(b'"decode_tokens_per_s":1', b'"decode_tokens_per_s":1,"decode_batch_slope":-5'),
        good.replace(b"tiny-fp32", "winzig-\u00fc".encode()),
        good.replace(b"tiny-fp32", b"x" * 100_000),
        b"7",
    ]
    body = b'{"data":[%s]}' % b",".join([*bad, good])

    async def handler(head: bytes, reader, writer) -> None:
        models = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        writer.write(HEALTH if head.startswith(b"GET /health/ready") else models)
        await writer.drain()

    async with raw_server(handler) as url, upstream(url) as tier:
        assert (await best(tier)).info.variant == "tiny-fp32"
        assert len(tier.replicas) == 1


async def test_a_list_of_rungs_nested_without_end_is_a_probe_that_failed() -> None:
    """It was a crash of the poll at every probe: no verdict, and a traceback a second in the log."""
    failed = asyncio.Event()
    deep = b'{"data":[' + b"[" * 100_000

    async def handler(head: bytes, reader, writer) -> None:
        models = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(deep), deep)
        writer.write(HEALTH if head.startswith(b"GET /health/ready") else models)
        await writer.drain()

    hooks = SourceHooks(probe_failed=lambda *_: failed.set())
    async with raw_server(handler) as url, upstream(url, hooks=hooks) as tier:
        await asyncio.wait_for(failed.wait(), 60)
        assert not tier.condition.reachable


async def test_the_time_until_an_upstream_is_back_is_its_own_word() -> None:
    async def handler(head: bytes, reader, writer) -> None:
        if head.startswith(b"GET /health/ready"):
            writer.write(
                b"HTTP/1.1 503 No\r\nretry-after-ms: 12500\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
            )
        else:
            writer.write(MODELS)
        await writer.drain()

    async with raw_server(handler) as url, upstream(url) as tier:
        await until(lambda: tier.replicas and tier.condition.reachable)
        assert tier.replicas[0].snapshot().back_in_s == 12.5
