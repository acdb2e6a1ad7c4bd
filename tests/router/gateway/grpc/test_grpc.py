"""KServe V2 over gRPC through the real Triton client and raw stubs, on a real server around the real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from router.base.errors import ConfigError
from router.gateway.app import create_app
from router.gateway.deps import GatewayDeps, GatewayLimits
from router.gateway.grpc import codec
from router.gateway.grpc.listener import GrpcListener
from router.gateway.grpc.settings import GrpcSettings
from router.values.prompt import TextPrompt
from router.values.request import Locality, Objective
from router.values.sampling import SamplingParams
from tests.support.gateway_fakes import FakeDispatcher, gateway_deps
from tests.support.waiting import until

KEY = "k" * 16


@contextlib.asynccontextmanager
async def grpc_gateway(deps: GatewayDeps) -> AsyncIterator[GrpcListener]:
    listener = GrpcListener(create_app(deps), GrpcSettings(enabled=True, port=0), ("127.0.0.1", 0), deps.limits)
    async with listener.running():
        yield listener


@contextlib.asynccontextmanager
async def grpc_client(deps: GatewayDeps) -> AsyncIterator[triton_aio.InferenceServerClient]:
    async with grpc_gateway(deps) as listener, triton_aio.InferenceServerClient(f"127.0.0.1:{listener.port}") as client:
        yield client


class Rig:
    """A gRPC gateway on a loop of its own, so that clients that block can call it."""

    def __init__(self, **changes) -> None:
        self.dispatcher = FakeDispatcher()
        self.deps = gateway_deps(self.dispatcher, **changes)
        self.loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._ready: queue.Queue[GrpcListener] = queue.Queue()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._serve(),), name="grpc rig")

    async def _serve(self) -> None:
        async with grpc_gateway(self.deps) as listener:
            self._ready.put(listener)
            await self._stop.wait()

    def __enter__(self) -> Rig:
        self._thread.start()
        self.listener = self._ready.get(timeout=20)
        self.address = f"127.0.0.1:{self.listener.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self.loop.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with Rig(max_priority=5) as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Rig:
    shared.dispatcher.forget()
    return shared


@pytest.fixture
def client(rig: Rig) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(rig.address) as client:
        yield client


def tensor(name: str, datatype: str, *values: object) -> triton.InferInput:
    kind = object if datatype == "BYTES" else triton.triton_to_np_dtype(datatype)
    data = np.array([v.encode() if isinstance(v, str) else v for v in values], dtype=kind)
    found = triton.InferInput(name, [len(values)], datatype)
    found.set_data_from_numpy(data)
    return found


def text(*prompts: str) -> triton.InferInput:
    return tensor("text_input", "BYTES", *prompts)


# ── the server and its models ───────────────────────────────────────────────────────────────────────────────────────


def test_server_and_model_say_what_they_are(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny-int8", "1")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready("tiny", "2")
    assert client.get_server_metadata().name == "overspill"
    metadata = client.get_model_metadata("tiny")
    assert (metadata.name, list(metadata.versions)) == ("tiny", ["1"])
    assert (metadata.inputs[0].name, metadata.inputs[0].datatype, list(metadata.inputs[0].shape)) == (
        "text_input",
        "BYTES",
        [-1, 1],
    )
    config = client.get_model_config("tiny").config
    assert (config.backend, config.max_batch_size, config.model_transaction_policy.decoupled) == ("overspill", 8, True)
    assert config.parameters["context_tokens"].string_value == "2048"
    with pytest.raises(InferenceServerException, match="not served here"):
        client.get_model_metadata("other")


def test_statistics_come_over_grpc_too(client: triton.InferenceServerClient) -> None:
    told = client.get_inference_statistics()
    assert {stats.name for stats in told.model_stats} == {"tiny-fp32", "tiny-int8"}
    assert client.get_inference_statistics("tiny").model_stats[0].inference_stats.success.count == 0


# ── inference ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_infer_carries_the_promise_and_tells_the_route(client: triton.InferenceServerClient, rig: Rig) -> None:
    outputs = [triton.InferRequestedOutput("text_output"), triton.InferRequestedOutput("num_output_tokens")]
    result = client.infer(
        "tiny",
        [
            text("say Grüße an alle"),
            tensor("max_tokens", "INT32", 2),
            tensor("temperature", "FP32", 0.5),
            tensor("ignore_eos", "BOOL", True),
        ],
        outputs=outputs,
        request_id="7",
        headers={"x-request-id": "g1", "x-overspill-priority": "2", "x-overspill-locality": "local-only"},
        parameters={"seed": 9},
    )
    assert result.as_numpy("text_output").tolist() == ["Grüße an".encode()]
    assert result.as_numpy("num_output_tokens").tolist() == [2]
    assert (result.get_response().id, result.get_response().model_version) == ("7", "1")
    seen = rig.dispatcher.requests[0]
    assert (seen.request_id, seen.prompt) == ("g1", TextPrompt("say Grüße an alle"))
    assert seen.sampling == SamplingParams(max_tokens=2, temperature=0.5, ignore_eos=True, seed=9)
    assert seen.objective == Objective(priority=2, locality=Locality.LOCAL_ONLY)


def test_typed_contents_and_raw_ones_are_one(rig: Rig) -> None:
    request = service_pb2.ModelInferRequest(model_name="tiny", id="t")
    prompt = request.inputs.add(name="text_input", datatype="BYTES", shape=[2, 1])
    prompt.contents.bytes_contents.extend([b"say a b", "say é f".encode()])
    request.inputs.add(name="max_tokens", datatype="INT32", shape=[1]).contents.int_contents.append(1)
    request.inputs.add(name="temperature", datatype="FP64", shape=[1]).contents.fp64_contents.append(0.25)
    request.parameters["exclude_input_in_output"].bool_param = True
    with grpc.insecure_channel(rig.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        reply, call = stub.ModelInfer.with_call(request, metadata=(("x-request-id", "typed"),))
    assert list(reply.outputs[0].shape) == [2, 1]
    assert reply.raw_output_contents[0] == b"\x01\0\0\0a" + b"\x02\0\0\0\xc3\xa9"
    told = dict(call.initial_metadata())
    assert (told["x-request-id"], told["x-overspill-model"], told["x-overspill-degraded"]) == (
        "typed",
        "tiny-int8",
        "true",
    )
    assert [r.sampling.temperature for r in rig.dispatcher.requests] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r.inputs.pop(), "text_input"),
        (lambda r: r.inputs[0].ClearField("contents"), "elements"),
        (lambda r: setattr(r.inputs[0], "datatype", "STRING"), "none of BYTES"),
        (lambda r: r.raw_input_contents.extend([b"", b""]), "send all of them raw"),
        (lambda r: r.inputs.add(name="seed", datatype="INT8", shape=[1]).contents.int_contents.append(300), "INT8"),
        (lambda r: r.inputs.add(name="x", datatype="FP16", shape=[1]), "raw_input_contents"),
        (lambda r: r.inputs.add(name="image", datatype="FP32", shape=[1]).contents.fp32_contents.append(1), "image"),
        (lambda r: r.outputs.add(name="logits"), "outputs[0].name"),
        (lambda r: r.parameters["max_tokens"].__setattr__("int64_param", 0), "max_tokens"),
        (lambda r: r.parameters["locality"].__setattr__("string_param", "local-only"), "parameters.locality"),
        (lambda r: setattr(r, "model_version", "2"), "version 1 only"),
    ],
)
def test_what_is_wrong_is_named_with_its_code(rig: Rig, change, named: str) -> None:
    request = service_pb2.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"say a")
    change(request)
    with grpc.insecure_channel(rig.address) as channel, pytest.raises(grpc.RpcError) as raised:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    wanted = grpc.StatusCode.NOT_FOUND if "version" in named else grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.code() is wanted
    assert named in raised.value.details()
    assert not rig.dispatcher.requests


@pytest.mark.parametrize(
    ("prompt", "code", "pushback"),
    [
        ("refuse shed", grpc.StatusCode.RESOURCE_EXHAUSTED, "250"),
        ("refuse unavailable", grpc.StatusCode.UNAVAILABLE, "7200"),
        ("refuse deadline", grpc.StatusCode.DEADLINE_EXCEEDED, "-1"),
        ("refuse long", grpc.StatusCode.INVALID_ARGUMENT, None),
        ("break", grpc.StatusCode.UNAVAILABLE, None),
        ("crash", grpc.StatusCode.INTERNAL, None),
    ],
)
def test_refusals_have_their_codes_and_say_when_to_come_back(rig: Rig, prompt: str, code, pushback) -> None:
    request = service_pb2.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(prompt.encode())
    with grpc.insecure_channel(rig.address) as channel, pytest.raises(grpc.RpcError) as raised:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)
    told = dict(raised.value.trailing_metadata())
    assert raised.value.code() is code
    assert len(told["x-request-id"]) == 32
    assert told.get("retry-after-ms") == (pushback if pushback != "-1" else "1000")


def test_batches_go_over_grpc(client: triton.InferenceServerClient) -> None:
    result = client.infer("tiny", [text("say a", "refuse shed", "say c")])
    assert result.as_numpy("text_output").tolist() == [b"a", b"", b"c"]
    assert result.as_numpy("error").tolist() == [b"", b"the queue is full", b""]


# ── deadlines, cancellation, bounds ─────────────────────────────────────────────────────────────────────────────────


def test_the_timeout_of_a_call_is_its_deadline_and_the_sooner_of_two_counts(
    client: triton.InferenceServerClient, rig: Rig
) -> None:
    client.infer("tiny", [text("say a")], client_timeout=3.0)
    client.infer("tiny", [text("say a")], client_timeout=3.0, headers={"x-overspill-deadline-ms": "500"})
    client.infer("tiny", [text("say a")], client_timeout=3.0, headers={"x-overspill-deadline-ms": "50000"})
    client.infer("tiny", [text("say a")], headers={"x-overspill-deadline-ms": "700"})
    first, second, third, fourth = (request.objective.deadline_s for request in rig.dispatcher.requests)
    assert first == pytest.approx(2.95, abs=0.2)
    assert (second, fourth) == (0.5, 0.7)
    assert third == pytest.approx(2.95, abs=0.2)
    with pytest.raises(InferenceServerException, match="x-overspill-deadline-ms"):
        client.infer("tiny", [text("say a")], client_timeout=3.0, headers={"x-overspill-deadline-ms": "soon"})


@pytest.mark.parametrize("prompt", ["hang", "forever"])
def test_a_call_that_is_cancelled_ends_its_work(rig: Rig, prompt: str) -> None:
    request = service_pb2.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(prompt.encode())
    with grpc.insecure_channel(rig.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelInfer.future(request, metadata=(("x-request-id", f"left-{prompt}"),))
        while not rig.dispatcher.requests:
            time.sleep(0.01)
        call.cancel()
        wait = rig.dispatcher.wait_cancelled if prompt == "hang" else rig.dispatcher.wait_closed
        assert wait(f"left-{prompt}")
    late = triton.InferenceServerClient(rig.address)
    with pytest.raises(InferenceServerException, match="Deadline"):
        late.infer("tiny", [text("hang")], client_timeout=0.3, headers={"x-request-id": "late"})
    assert rig.dispatcher.wait_cancelled("late")
    late.close()


async def test_a_message_beyond_the_bound_is_refused_and_the_connection_lives() -> None:
    deps = gateway_deps(limits=GatewayLimits(max_body_bytes=10_000))
    async with grpc_gateway(deps) as listener, triton_aio.InferenceServerClient(f"127.0.0.1:{listener.port}") as client:
        for words in (20_000, 200_000):
            with pytest.raises(InferenceServerException) as raised:
                await client.infer("tiny", [text("say " + "x" * words)])
            assert "RESOURCE_EXHAUSTED" in str(raised.value.status())
        with pytest.raises(InferenceServerException, match="larger than max"):  # packed, it is a few kilobytes
            await client.infer("tiny", [text("say " + "x" * 20_000_000)], compression_algorithm="gzip")
        assert (await client.infer("tiny", [text("say a")])).as_numpy("text_output").tolist() == [b"a"]


async def test_a_tier_that_drains_refuses_and_says_when_to_come_back() -> None:
    deps = gateway_deps(closed=lambda: "draining")
    async with grpc_gateway(deps) as listener, triton_aio.InferenceServerClient(f"127.0.0.1:{listener.port}") as client:
        assert await client.is_server_live()
        assert not await client.is_server_ready()
        assert not await client.is_model_ready("tiny")
        with pytest.raises(InferenceServerException, match="draining"):
            await client.infer("tiny", [text("say a")])


async def test_calls_in_flight_are_counted_for_the_drain() -> None:
    async with grpc_gateway(gateway_deps()) as listener:
        async with triton_aio.InferenceServerClient(f"127.0.0.1:{listener.port}") as client:
            call = asyncio.create_task(client.infer("tiny", [text("slow a b c d e f g h")]))
            await until(lambda: listener.busy > 0)
            await call
        assert listener.busy == 0


async def test_a_stream_on_which_nothing_is_asked_holds_no_drain() -> None:
    more = asyncio.Event()

    async def asking() -> AsyncIterator[dict]:
        yield {"model_name": "tiny", "inputs": [text("slow a b c d e f g h"), tensor("stream", "BOOL", True)]}
        await more.wait()

    async with (
        grpc_gateway(gateway_deps()) as listener,
        triton_aio.InferenceServerClient(f"127.0.0.1:{listener.port}") as client,
    ):
        results = client.stream_infer(asking())
        await results.__anext__()
        assert listener.busy == 1
        await until(lambda: listener.busy == 0)
        more.set()
        assert [error async for _, error in results if error] == []


async def test_a_request_of_a_stream_that_crashes_is_answered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = codec.stream_response

    def crashes(messages, request, event):
        if request.id == "1":
            raise ZeroDivisionError
        return shown(messages, request, event)

    monkeypatch.setattr(codec, "stream_response", crashes)
    found = await asyncio.wait_for(gathered(rig.address, asked("say a", "say b", "say c")), 60)
    assert [error for _, _, error, _ in found if error] == ["internal error"]
    assert {number for number, _, error, _ in found if not error} == {"0", "2"}


async def test_a_port_that_is_taken_is_named() -> None:
    async with grpc_gateway(gateway_deps()) as listener:
        settings = GrpcSettings(enabled=True, port=listener.port)
        second = GrpcListener(create_app(gateway_deps()), settings, ("127.0.0.1", 0), GatewayLimits())
        with pytest.raises(ConfigError, match=r"grpc\.port"):
            async with second.running():
                raise AssertionError("two servers on one port")


# ── who may come in ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_keys_are_asked_for_as_over_http() -> None:
    async with grpc_client(gateway_deps(api_keys={KEY: 3})) as client:
        assert await client.is_server_ready()
        for headers in (None, {"authorization": "Bearer wrong"}):
            for call in (
                partial(client.infer, "tiny", [text("say a")]),
                partial(client.get_server_metadata),
                partial(client.is_model_ready, "tiny"),
                partial(client.get_inference_statistics),
            ):
                with pytest.raises(InferenceServerException) as raised:
                    await call(headers=headers)
                assert "UNAUTHENTICATED" in str(raised.value.status())
        found = await client.infer("tiny", [text("say a")], headers={"authorization": f"Bearer {KEY}"})
        assert found.as_numpy("text_output").tolist() == [b"a"]
        results = client.stream_infer(asked("say a"))
        with pytest.raises(grpc.RpcError, match="API key"):
            await anext(aiter(results))


async def test_without_keys_nobody_comes_in_through_a_proxy_of_this_host() -> None:
    async with grpc_client(gateway_deps()) as client:
        for headers in ({"x-forwarded-for": "10.0.0.5"}, {"x-forwarded-host": "api.example"}):
            with pytest.raises(InferenceServerException):
                await client.infer("tiny", [text("say a")], headers=headers)


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def asked(*prompts: str, stream: bool = True, **more) -> AsyncIterator[dict]:
    for number, prompt in enumerate(prompts):
        inputs = [text(prompt), *([tensor("stream", "BOOL", True)] if stream else [])]
        yield {"model_name": "tiny", "inputs": inputs, "request_id": str(number), **more}


async def gathered(address: str, requests: AsyncIterator[dict], **more) -> list[tuple[str, str, str, bool]]:
    """Return id, text, error and finality of each response."""
    found = []
    async with triton_aio.InferenceServerClient(address) as client:
        async for result, error in client.stream_infer(requests, **more):
            if error is not None:
                found.append(("", "", error.message(), False))
                continue
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            found.append((response.id, result.as_numpy("text_output")[0].decode(), "", final))
    return found


async def test_a_decoupled_model_answers_piece_by_piece(rig: Rig) -> None:
    found = await gathered(rig.address, asked("slow a b c d"), headers={"x-request-id": "s1"})
    assert len(found) > 2
    assert "".join(piece for _, piece, _, _ in found) == "a b c d"
    assert {number for number, *_ in found} == {"0"}
    assert [final for *_, final in found] == [False] * (len(found) - 1) + [True]
    assert rig.dispatcher.requests[0].request_id == "s1"


async def test_a_stream_tells_more_where_it_is_asked_to(rig: Rig) -> None:
    async with triton_aio.InferenceServerClient(rig.address) as client:

        async def asking() -> AsyncIterator[dict]:
            flags = [tensor(name, "BOOL", True) for name in ("stream", "return_num_output_tokens")]
            yield {"model_name": "tiny", "inputs": [text("slow a b c"), *flags]}

        results = [result async for result, _ in client.stream_infer(asking())]
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 3
    assert all(result.as_numpy("finish_reason") is None for result in results)


async def test_a_stream_without_pieces_answers_each_request_once(rig: Rig) -> None:
    found = await gathered(rig.address, asked("say a b", "say c d", stream=False))
    assert sorted(found) == [("0", "a b", "", True), ("1", "c d", "", True)]


async def test_requests_of_one_stream_run_side_by_side_and_fail_alone(rig: Rig) -> None:
    prompts = ("slow a b c d e f g h i j", "refuse shed", "break", "say quick")
    found = await gathered(rig.address, asked(*prompts))
    texts = {number: "".join(piece for n, piece, *_ in found if n == number) for number in ("0", "2", "3")}
    assert (texts["0"], texts["3"]) == ("a b c d e f g h i j", "quick")
    assert sorted(error for _, _, error, _ in found if error) == ["the queue is full", "the replica died"]
    order = [number for number, _, error, _ in found if not error]
    assert order.index("3") < len(order) - 1 - order[::-1].index("0"), "the quick one did not wait for the slow one"


async def test_a_stream_names_what_is_wrong_of_each_request(rig: Rig) -> None:
    async def odd() -> AsyncIterator[dict]:
        for inputs in ([text("a", "b"), tensor("stream", "BOOL", True)], [text("a"), tensor("image", "FP32", 1.0)]):
            yield {"model_name": "tiny", "inputs": inputs}
        yield {"model_name": "other", "inputs": [text("a"), tensor("stream", "BOOL", True)]}

    errors = [error for _, _, error, _ in await gathered(rig.address, odd())]
    assert sorted(error.split("`")[1] for error in errors) == ["image", "model", "text_input"]


def test_the_blocking_client_streams_too_and_its_end_ends_the_work(rig: Rig) -> None:
    results: queue.Queue = queue.Queue()
    with triton.InferenceServerClient(rig.address) as client:
        client.start_stream(lambda result, error: results.put((result, error)), headers={"x-request-id": "cb"})
        client.async_stream_infer("tiny", [text("forever"), tensor("stream", "BOOL", True)], request_id="1")
        pieces = [results.get(timeout=10) for _ in range(5)]
        client.stop_stream(cancel_requests=True)
    assert all(error is None for _, error in pieces)
    assert rig.dispatcher.wait_closed("cb")


def test_the_asynchronous_call_of_the_blocking_client(client: triton.InferenceServerClient, rig: Rig) -> None:
    results: queue.Queue = queue.Queue()
    client.async_infer("tiny", [text("say a b")], lambda result, error: results.put((result, error)))
    result, error = results.get(timeout=10)
    assert error is None
    assert result.as_numpy("text_output").tolist() == [b"a b"]
    context = client.async_infer(
        "tiny", [text("hang")], lambda result, error: results.put((result, error)), headers={"x-request-id": "async"}
    )
    while len(rig.dispatcher.requests) < 2:
        time.sleep(0.01)
    context.cancel()
    assert rig.dispatcher.wait_cancelled("async")


async def test_a_reader_that_stops_reading_loses_its_stream() -> None:
    """What it does not take is not kept for it without bound."""
    dispatcher = FakeDispatcher()
    deps = gateway_deps(dispatcher, limits=GatewayLimits(send_stall_s=0.5))
    async with grpc_gateway(deps) as listener, grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(metadata=(("x-request-id", "stuck"),))
        request = service_pb2.ModelInferRequest(model_name="tiny")
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"flood")
        request.parameters["stream"].bool_param = True
        await call.write(request)
        await call.read()
        assert await asyncio.to_thread(dispatcher.wait_closed, "stuck")
        call.cancel()
