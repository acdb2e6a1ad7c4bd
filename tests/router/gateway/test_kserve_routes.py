"""KServe V2 through the real Triton client and raw HTTP, on a real uvicorn."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from router.values.replica import ReplicaSnapshot
from router.values.request import Objective, SamplingParams, TextPrompt
from tests.support.gateway_fakes import INFOS, FakeDispatcher, Server, gateway_deps, serving

INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def shared_server():
    with serving(gateway_deps(max_priority=5)) as running:
        yield running


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.dispatcher.forget()
    return shared_server


@pytest.fixture
def client(server: Server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


@pytest.fixture
def http(server: Server):
    with httpx.Client(base_url=server.url) as client:
        yield client


def text(value: str, *, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=object), binary_data=binary)
    return tensor


def scalar(name: str, datatype: str, value: np.generic, *, binary: bool = True) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(np.array([value]), binary_data=binary)
    return tensor


def test_server_and_model_say_what_they_are(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny-int8", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("tiny")
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    assert metadata["outputs"][0] == {"name": "text_output", "datatype": "BYTES", "shape": [1]}


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer(client: triton.InferenceServerClient, server: Server, binary_in: bool, binary_out: bool) -> None:
    inputs = [
        text("say Grüße an alle", binary=binary_in),
        scalar("max_tokens", "INT32", np.int32(2), binary=binary_in),
        scalar("temperature", "FP32", np.float32(0.5), binary=binary_in),
        scalar("ignore_eos", "BOOL", np.bool_(True), binary=binary_in),
    ]
    outputs = [
        triton.InferRequestedOutput("text_output", binary_data=binary_out),
        triton.InferRequestedOutput("num_output_tokens", binary_data=binary_out),
    ]
    result = client.infer(
        "tiny",
        inputs,
        outputs=outputs,
        request_id="7",
        timeout=2_500_000,
        headers={"x-request-id": "k1", "x-overspill-priority": "2"},
    )
    answer = result.as_numpy("text_output")
    assert [a if isinstance(a, str) else a.decode() for a in answer] == ["Grüße an"]
    assert result.as_numpy("num_output_tokens").tolist() == [2]
    assert result.get_response()["id"] == "7"
    seen = server.dispatcher.requests[0]
    assert seen.prompt == TextPrompt("say Grüße an alle")
    assert seen.sampling == SamplingParams(max_tokens=2, temperature=0.5, ignore_eos=True)
    assert seen.objective == Objective(deadline_s=2.5, priority=2)
    assert (seen.request_id, seen.prompt_tokens) == ("k1", 4)


@pytest.mark.parametrize("how", ["gzip", "deflate"])
def test_compressed_requests(client: triton.InferenceServerClient, how: str) -> None:
    result = client.infer("tiny-int8", [text("say hi")], request_compression_algorithm=how)
    assert result.as_numpy("text_output").tolist() == [b"hi"]


def test_parameters_of_the_client(client: triton.InferenceServerClient, server: Server) -> None:
    client.infer("tiny", [text("say a b c")], parameters={"max_tokens": 1, "stop": "x"})
    assert server.dispatcher.requests[0].sampling == SamplingParams(max_tokens=1, stop=("x",))


def test_errors_reach_the_client_as_text(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="tiny-int8"):
        client.infer("tiny-int9", [text("x")])
    with pytest.raises(InferenceServerException, match="max_tokens"):
        client.infer("tiny", [text("x")], parameters={"max_tokens": -1})
    with pytest.raises(InferenceServerException, match="sequence_id"):
        client.infer("tiny", [text("x")], sequence_id=5, sequence_start=True)
    with pytest.raises(InferenceServerException, match="queue is full"):
        client.infer("tiny", [text("refuse shed")])
    with pytest.raises(InferenceServerException, match="replica died"):
        client.infer("tiny", [text("break")])


def test_replies_carry_the_route(http: httpx.Client) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["say hi"]}]}
    reply = http.post(INFER, json=body, headers={"endpoint-load-metrics-format": "JSON"})
    assert reply.json()["outputs"][0]["data"] == ["hi"]
    assert reply.headers["x-overspill-model"] == "tiny-int8"
    assert reply.headers["endpoint-load-metrics"].startswith("JSON {")
    refused = http.post(INFER, json={"inputs": [{**body["inputs"][0], "data": ["refuse unavailable"]}]})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "8")
    assert refused.json() == {"error": "no replica is healthy"}


@pytest.mark.parametrize("path", ["/v2/nothing", "/v2/models/other", "/v2/models/tiny/versions/2", "/v2/models/tiny/x"])
def test_unknown_paths_are_v2_errors(http: httpx.Client, path: str) -> None:
    reply = http.get(path)
    assert reply.status_code == 404
    assert list(reply.json()) == ["error"]


def test_a_model_without_replicas_is_not_ready() -> None:
    dispatcher = FakeDispatcher(
        snapshots=[ReplicaSnapshot(i, available=False, slots=1, why="restarting") for i in INFOS]
    )
    with serving(gateway_deps(dispatcher)) as server, httpx.Client(base_url=server.url) as http:
        reply = http.get("/v2/models/tiny/ready")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "restarting" in reply.json()["error"]
