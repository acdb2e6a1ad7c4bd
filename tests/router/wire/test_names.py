"""What is nearly ours is refused, and what is somebody else's passes: a lost `local-only` sends out what must stay."""

from __future__ import annotations

import json
import time

import pytest

from router.base.errors import InvalidRequest
from router.values.request import Locality, Objective
from router.wire import headers, names
from router.wire.kserve.request import decode_infer
from router.wire.openai.chat import decode_chat
from router.wire.openai.completion import decode_completion
from router.wire.promise import parse_objective

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}
INFER = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}


def locality_of(*lines: tuple[str, str]) -> Locality:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines]
    return parse_objective(headers.lower_case(raw), Objective()).locality


@pytest.mark.parametrize("second", ["any", "cloud-only", ""])
@pytest.mark.parametrize("name", [names.LOCALITY, "X-Overspill-Locality"])
def test_a_repeated_locality_is_refused_whichever_comes_last(name: str, second: str) -> None:
    for pair in (("local-only", second), (second, "local-only")):
        with pytest.raises(InvalidRequest) as raised:
            locality_of((names.LOCALITY, pair[0]), ("x-other", "1"), (name, pair[1]))
        assert raised.value.param == names.LOCALITY


def test_a_locality_repeated_in_agreement_stands() -> None:
    assert locality_of((names.LOCALITY, "local-only"), (names.LOCALITY, "local-only")) is Locality.LOCAL_ONLY


@pytest.mark.parametrize("value", ["local-only, any", "any,local-only", "local-only; any", "local-only any"])
def test_a_joined_locality_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        locality_of((names.LOCALITY, value))
    assert raised.value.param == names.LOCALITY


@pytest.mark.parametrize("name", [*names.REQUEST_NAMES, *names.TTFT_NAMES, *names.TPOT_NAMES])
def test_any_header_of_ours_with_two_values_is_refused(name: str) -> None:
    given = headers.lower_case([(name.encode(), b"1"), (name.encode(), b"2")])
    with pytest.raises(InvalidRequest) as raised:
        parse_objective(given, Objective())
    assert raised.value.param == name


def test_a_repeated_request_id_is_refused() -> None:
    with pytest.raises(InvalidRequest) as raised:
        headers.request_id(headers.lower_case([(b"x-request-id", b"a"), (b"x-request-id", b"b")]))
    assert raised.value.param == names.REQUEST_ID


def test_lists_of_others_are_joined_and_a_repeated_trace_is_no_trace() -> None:
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    states = [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    kept = headers.passed_on(headers.lower_case([(b"traceparent", trace), *states]))
    assert kept == (("traceparent", trace.decode()), ("tracestate", "a=1, b=2"))
    assert headers.passed_on(headers.lower_case([(b"traceparent", trace), (b"traceparent", trace[:-1] + b"0")])) == ()


@pytest.mark.parametrize(
    "name",
    [
        "x-overspil-locality",
        "x-overspilll-locality",
        "x-ovrespill-locality",
        "x-overspill_locality",
        "x_overspill_locality",
        "x-over-spill-locality",
        "xoverspill-locality",
        "overspill-locality",
        "overspill_locality",
        "overspil-localty",
        "x--overspill-locality",
        "x-overspill-localitty",
        "x-overspilllocality",
        "x.overspill.locality",
        "locality",
        "x-locality",
        "x-data-locality",
    ],
)
def test_a_name_that_is_nearly_ours_is_refused_and_the_right_one_told(name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        locality_of((name, "local-only"))
    assert raised.value.param == name
    assert "locality" in raised.value.message.partition("did you mean")[2] or "x-overspill" in raised.value.message


@pytest.mark.parametrize(
    "name",
    [
        "x-overspil-deadline-ms",
        "overspill-priority",
        "x-slo-ttft",
        "x_slo_ttft_ms",
        "slo-tpot-ms",
        "x-llmd-slo-ttft-ms",
    ],
)
def test_other_promises_under_nearly_our_names_are_refused_too(name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        locality_of((name, "250"))
    assert raised.value.param == name


@pytest.mark.parametrize(
    "name",
    [
        "x-override-priority",
        "x-override-locality",
        "x-overflow-policy",
        "x-overload-control",
        "x-over-limit",
        "x-http-method-override",
        "x-oversize-deadline-ms",
        "x-overspilled",
        "x-overall-priority",
        "x-session",
        "x-session-id",
        "x-priority",
        "priority",
        "x-deadline",
        "x-hop-count",
        "x-hops",
        "x-real-ip",
        "x-request-start",
        "x-request-priority",
        "x-amzn-trace-id",
        "x-envoy-upstream-rq-timeout-ms",
        "x-llm-d-inference-fairness-id",
        "x-llm-d-inference-objective",
        "x-gateway-model-name",
        "x-gateway-inference-objective",
        "x-stainless-retry-count",
        "x-stainless-read-timeout",
        "x-ratelimit-limit-requests",
        "x-quality",
        "x-model",
        "x-tier",
        "x-kong-request-id",
        "openai-organization",
        "openai-project",
        "endpoint-load-metrics-format",
        "inference-header-content-length",
        "locality-hint",
        "x-geo-locality",
        "accept-language",
        "sec-fetch-site",
    ],
)
def test_headers_of_others_pass(name: str) -> None:
    assert locality_of((name, "u=1"), (names.LOCALITY, "local-only")) is Locality.LOCAL_ONLY


@pytest.mark.parametrize(
    "name",
    [
        "locality",
        "Locality",
        "localty",
        "locallity",
        "data_locality",
        "x-overspill-locality",
        "x_overspill_locality",
        "overspill_locality",
        "overspil_locality",
    ],
)
@pytest.mark.parametrize("body", [CHAT, COMPLETION, INFER])
def test_a_locality_in_a_body_is_refused_by_name(name: str, body: dict) -> None:
    decode = {id(CHAT): decode_chat, id(COMPLETION): decode_completion}.get(id(body), lambda b: decode_infer(b, None))
    for at, fields in (("", {name: "local-only"}), ("extra_body.", {"extra_body": {name: "local-only"}})):
        with pytest.raises(InvalidRequest) as raised:
            decode(json.dumps({**body, **fields}).encode())
        assert raised.value.param == at + name
        assert names.LOCALITY in raised.value.message


@pytest.mark.parametrize(
    "fields",
    [
        b'"extra_body":{"locality":"local-only"},"extra_body":{}',
        b'"extra_body":{"extra_body":{"locality":"local-only"}}',
        b'"extra_headers":{"x-overspill-locality":"local-only"}',
        b'"headers":{"x-overspill-locality":"local-only"}',
        b'"overspill":{"locality":"local-only"}',
        b'"x-overspill":"local-only"',
        b'"local_only":true',
        b'"locality":"local-only","locality":"any"',
    ],
)
@pytest.mark.parametrize("body", [CHAT, COMPLETION, INFER])
def test_a_locality_that_hides_in_a_body_is_refused(fields: bytes, body: dict) -> None:
    """Crack 1: the last `extra_body` alone was looked at, and nothing below it."""
    decode = {id(CHAT): decode_chat, id(COMPLETION): decode_completion}.get(id(body), lambda b: decode_infer(b, None))
    with pytest.raises(InvalidRequest):
        decode(json.dumps(body).encode()[:-1] + b"," + fields + b"}")


@pytest.mark.parametrize("name", ["locality", "x-overspill-locality", "local_only"])
def test_a_locality_among_the_parameters_of_a_tensor_is_refused(name: str) -> None:
    """Crack 1: those of `inputs` and `outputs` are read by nobody either."""
    tensor = {**INFER["inputs"][0], "parameters": {name: "local-only"}}
    outputs = [{"name": "text_output", "parameters": {name: "local-only"}}]
    for changed in ({"inputs": [tensor]}, {"outputs": outputs}):
        with pytest.raises(InvalidRequest):
            decode_infer(json.dumps({**INFER, **changed}).encode(), None)


@pytest.mark.parametrize("name", ["x-overspill", "overspill"])
def test_a_header_that_is_our_name_alone_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        locality_of((name, "local-only"))


@pytest.mark.parametrize(
    "name", ["deadline_ms", "ttft_slo_ms", "tpot_slo_ms", "min_quality", "slo_ttft_ms", "deadline"]
)
def test_other_promises_in_a_body_are_refused_too(name: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode_chat(json.dumps({**CHAT, name: 1}).encode())
    assert raised.value.param == name


@pytest.mark.parametrize("name", ["locality", "x-overspill-locality", "deadline_ms", "priority"])
def test_a_promise_among_kserve_parameters_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_infer(json.dumps({**INFER, "parameters": {name: 1}}).encode(), None)


def test_a_chat_refuses_what_only_a_completion_continues() -> None:
    decode_completion(json.dumps({**COMPLETION, "overspill_continuation": "a"}).encode())
    with pytest.raises(InvalidRequest):
        decode_chat(json.dumps({**CHAT, "overspill_continuation": "a"}).encode())


OTHERS = [
    "quality",
    "timeout",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "verbosity",
    "reasoning_effort",
    "prediction",
    "session_id",
    "session",
    "transforms",
    "route",
    "provider",
    "models",
    "plugins",
    "include_reasoning",
    "request_id",
    "cache_salt",
    "location",
    "max_quality",
    "deadline_policy",
    "locale",
    "region",
]


def test_fields_of_other_vendors_pass() -> None:
    call = decode_chat(json.dumps({**CHAT, **dict.fromkeys(OTHERS, "x"), "metadata": {"locality": "Kiel"}}).encode())
    assert call.model == "m"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        (b"locality=local-only", "locality"),
        (b"a=1&x-overspill-locality=local-only", "x-overspill-locality"),
        (b"loc%61lity=local-only", "locality"),
        (b"priority=5", "priority"),
        (b"locality", "locality"),
    ],
)
def test_a_promise_in_the_query_is_refused(query: bytes, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        names.refuse_query(query)
    assert raised.value.param == param


def test_queries_of_others_pass() -> None:
    names.refuse_query(b"")
    names.refuse_query(b"api-version=2024-10-21&stream=1&x=%ff%00")


def test_thousands_of_names_cost_no_time() -> None:
    """Each name is compared with ours: their number is bounded before that."""
    many = {f"overspxill{n}": "1" for n in range(20_000)}
    began_s = time.process_time()
    for refuse in (
        lambda: parse_objective(many, Objective()),
        lambda: decode_chat(json.dumps({**CHAT, **many}).encode()),
        lambda: names.refuse_query("&".join(many).encode()),
    ):
        with pytest.raises(InvalidRequest):
            refuse()
    assert time.process_time() - began_s < 2


def test_a_body_of_many_fields_is_read_no_further_than_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read 900,000 of them took more than a second, on the event loop."""
    read: list[str] = []
    real = names._Field.__init__
    monkeypatch.setattr(names._Field, "__init__", lambda self, name: (read.append(name), real(self, name))[1])
    made_up = ",".join(f'"k{n}":1' for n in range(20_000))
    body = f'{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{made_up}}}'.encode()
    with pytest.raises(InvalidRequest, match="more than the 256 fields"):
        decode_chat(body)
    assert len(read) == names.MAX_FIELDS


def test_a_long_body_of_few_fields_is_looked_at_too() -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "hi" * 100_000}]}
    assert decode_chat(json.dumps(body).encode()).model == "m"
    with pytest.raises(InvalidRequest) as raised:
        decode_chat(json.dumps({**body, "data_locality": "local-only"}).encode())
    assert raised.value.param == "data_locality"
