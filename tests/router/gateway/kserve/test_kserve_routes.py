"""KServe V2 through the real Triton client and raw HTTP, on a real uvicorn."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from router.gateway.deps import GatewayLimits
from router.values.prompt import TextPrompt
from router.values.replica import ReplicaSnapshot
from router.values.request import Objective
from router.values.sampling import SamplingParams
from router.values.status import Tally
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
    assert client.get_server_metadata()["extensions"][:2] == ["binary_tensor_data", "model_configuration"]
    metadata = client.get_model_metadata("tiny")
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}
    assert metadata["outputs"][0] == {"name": "text_output", "datatype": "BYTES", "shape": [-1, 1]}


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


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def batch(*prompts: str, column: bool = False) -> triton.InferInput:
    values = np.array([prompt.encode() for prompt in prompts], dtype=object)
    values = values.reshape(-1, 1) if column else values
    tensor = triton.InferInput("text_input", list(values.shape), "BYTES")
    tensor.set_data_from_numpy(values)
    return tensor


@pytest.mark.parametrize("column", [False, True], ids=["[N]", "[N, 1]"])
def test_a_batch_is_answered_in_order_each_prompt_a_request_of_its_own(
    client: triton.InferenceServerClient, server: Server, column: bool
) -> None:
    prompts = [f"slow {'word ' * (4 - n)}{n}" for n in range(4)]
    result = client.infer("tiny", [batch(*prompts, column=column)], headers={"x-request-id": "b"})
    answers = result.as_numpy("text_output")
    assert answers.shape == ((4, 1) if column else (4,))
    assert [answer.decode().split()[-1] for answer in answers.ravel()] == ["0", "1", "2", "3"]
    assert sorted(request.request_id for request in server.dispatcher.requests) == ["b", "b.1", "b.2", "b.3"]


def test_one_prompt_that_fails_loses_no_other_and_is_told_apart(
    client: triton.InferenceServerClient, server: Server
) -> None:
    result = client.infer("tiny", [batch("say a", "refuse shed", "break", "say d")])
    assert result.as_numpy("text_output").tolist() == [b"a", b"", b"", b"d"]
    assert result.as_numpy("error").tolist() == [b"", b"the queue is full", b"the replica died", b""]
    with pytest.raises(InferenceServerException, match="queue is full"):
        client.infer("tiny", [batch("refuse shed", "refuse unavailable")])
    assert client.infer("tiny", [batch("say a", "say b")]).as_numpy("error") is None


def test_a_caller_who_leaves_takes_the_whole_batch_along(server: Server, http: httpx.Client) -> None:
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["hang", "forever"]}]}
    with pytest.raises(httpx.ReadTimeout):
        http.post(INFER, json=body, headers={"x-request-id": "gone"}, timeout=0.5)
    assert server.dispatcher.wait_cancelled("gone")
    assert server.dispatcher.wait_closed("gone.1")


def test_a_batch_takes_a_place_for_each_prompt() -> None:
    limits = GatewayLimits(max_requests=3)
    with serving(gateway_deps(limits=limits)) as small, httpx.Client(base_url=small.url) as http:
        body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [5], "data": ["slow a b c d"] * 5}]}
        outputs = {output["name"]: output["data"] for output in http.post(INFER, json=body).json()["outputs"]}
    assert outputs["text_output"].count("a b c d") == 3
    assert len([error for error in outputs["error"] if "3 requests are in flight" in error]) == 2


# ── Triton's extensions ─────────────────────────────────────────────────────────────────────────────────────────────


def test_the_configuration_says_what_a_model_takes(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("tiny", "1")
    assert (config["name"], config["backend"], config["model_transaction_policy"]) == (
        "tiny",
        "overspill",
        {"decoupled": True},
    )
    assert config["max_batch_size"] == 8, "what its replicas compute at once"
    assert {"name": "max_tokens", "data_type": "TYPE_INT32", "dims": [1], "optional": True} in config["input"]
    assert config["parameters"]["context_tokens"] == {"string_value": "2048"}


def test_statistics_are_those_of_the_dispatcher(client: triton.InferenceServerClient, server: Server) -> None:
    server.dispatcher.ended[("cloud", "tiny-int8")] = Tally(
        answered=3, answered_s=4.5, waited_s=1.5, failed=1, failed_s=0.5, last_at_s=server.deps.clock.now_s()
    )
    try:
        family = client.get_inference_statistics("tiny")["model_stats"]
        every = client.get_inference_statistics()["model_stats"]
    finally:
        server.dispatcher.ended.clear()
    assert [(told["name"], told["inference_count"]) for told in family] == [("tiny", 3)]
    assert {told["name"]: told["inference_count"] for told in every} == {"tiny-fp32": 0, "tiny-int8": 3}
    stats = family[0]["inference_stats"]
    assert stats["success"] == {"count": 3, "ns": 4_500_000_000}
    assert stats["fail"] == {"count": 1, "ns": 500_000_000}
    assert (stats["queue"]["ns"], stats["compute_infer"]["ns"]) == (1_500_000_000, 3_000_000_000)
    assert abs(family[0]["last_inference"] / 1000 - time.time()) < 60


def test_generate_answers_in_plain_json(http: httpx.Client) -> None:
    asked = {"text_input": "say a b c", "max_tokens": 2, "outputs": ["text_output", "finish_reason"]}
    reply = http.post("/v2/models/tiny/versions/1/generate", json=asked)
    assert reply.json() == {
        "model_name": "tiny",
        "model_version": "1",
        "text_output": "a b",
        "finish_reason": "length",
    }
    assert reply.headers["x-overspill-model"] == "tiny-int8"
    assert http.post("/v2/models/tiny/generate", json={**asked, "stream": True}).status_code == 400
    assert http.post("/v2/models/tiny/generate", json={"text_input": "refuse shed"}).status_code == 429


def test_generate_stream_sends_each_piece_as_an_event(http: httpx.Client) -> None:
    asked = {"text_input": "slow a b c", "parameters": {"exclude_input_in_output": False}}
    with http.stream("POST", "/v2/models/tiny/generate_stream", json=asked) as reply:
        events = [json.loads(line[6:]) for line in reply.iter_lines() if line]
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert len(events) > 2
    assert "".join(event["text_output"] for event in events) == "slow a b ca b c"
    counted = {**asked, "outputs": ["num_output_tokens", "finish_reason"]}
    lines = http.post("/v2/models/tiny/generate_stream", json=counted).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line]
    assert sum(event["num_output_tokens"] for event in events) == 3
    assert [event["finish_reason"] for event in events][-1] == "stop"
    assert {event["finish_reason"] for event in events[:-1]} == {""}


@pytest.mark.parametrize(
    ("prompt", "told"), [("break", "the replica died"), ("bug", "internal error"), ("silent", "incomplete")]
)
def test_a_generated_stream_that_breaks_says_so(http: httpx.Client, prompt: str, told: str) -> None:
    reply = http.post("/v2/models/tiny/generate_stream", json={"text_input": prompt})
    assert reply.status_code == 200
    last = json.loads(reply.text.strip().splitlines()[-1][6:])
    assert list(last) == ["error"]
    assert told in last["error"]
    early = http.post("/v2/models/tiny/generate_stream", json={"text_input": "break-first"})
    assert (early.status_code, early.json()) == (502, {"error": "the replica died"})


def test_paths_of_v2_below_a_model_know_their_version(http: httpx.Client) -> None:
    for path in ("config", "stats", "ready"):
        assert http.get(f"/v2/models/tiny/versions/1/{path}").status_code == 200
        assert http.get(f"/v2/models/tiny/versions/2/{path}").status_code == 404
        assert http.get(f"/v2/models/other/{path}").status_code == 404


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_what_curl_calls_a_form_is_read_where_no_page_sent_it(http: httpx.Client, endpoint: str) -> None:
    """`curl -d '{…}'`, as Triton's own documentation has it, says `application/x-www-form-urlencoded`."""
    body, form = b'{"text_input": "say hi"}', {"content-type": "application/x-www-form-urlencoded"}
    path = f"/v2/models/tiny/{endpoint}"
    assert http.post(path, content=body, headers=form).status_code == 200
    for page in ({"origin": "http://localhost:3000"}, {"referer": "http://localhost/"}, {"sec-fetch-site": "none"}):
        assert http.post(path, content=body, headers={**form, **page}).status_code == 415


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_who_counts_on_an_answer_later_is_told_that_there_is_none(http: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"text_input": "say hi"}
    if path == "infer":
        body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["say hi"]}]}
    reply = http.post(f"/v2/models/tiny/{path}", json=body, headers={"x-overspill-defer": "allow"})
    assert reply.status_code == 400
    assert "`x-overspill-defer`: this call is not answered later" in reply.json()["error"]
