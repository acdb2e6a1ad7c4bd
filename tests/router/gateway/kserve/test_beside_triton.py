"""The same calls of Triton's own clients to a real Triton and to our gateway: replies of one make, errors alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from google.protobuf import json_format
from tritonclient.utils import InferenceServerException

from router.gateway.app import create_app
from router.gateway.grpc.listener import GrpcListener
from router.gateway.grpc.settings import GrpcSettings
from tests.support.gateway_fakes import gateway_deps, serving
from tests.support.live_triton import triton_server
from tests.support.ports import unused_port
from tests.support.waiting import until_answered

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]


def shape(value: Any) -> Any:
    """Return what a reply is made of: names and types, and of a list its first entry."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


def within(theirs: Any, ours: Any, at: str = "") -> list[str]:
    """Return what their reply has and ours lacks, or has as something else; an empty list may be of anything."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        missing = [f"{at}.{key}" for key in theirs.keys() - ours.keys()]
        both = theirs.keys() & ours.keys()
        return missing + [wrong for key in both for wrong in within(theirs[key], ours[key], f"{at}.{key}")]
    if isinstance(theirs, list) and isinstance(ours, list):
        return within(theirs[0], ours[0], f"{at}[]") if theirs and ours else []
    return [] if theirs == ours else [f"{at}: {theirs} there, {ours} here"]


def inputs(library: Any, *prompts: str, **more: int) -> list:
    text = library.InferInput("text_input", [len(prompts), 1], "BYTES")
    text.set_data_from_numpy(np.array([[prompt.encode()] for prompt in prompts], dtype=object))
    found = [text]
    for name, value in more.items():
        scalar = library.InferInput(name, [len(prompts), 1], "INT32")
        scalar.set_data_from_numpy(np.full((len(prompts), 1), value, dtype=np.int32))
        found.append(scalar)
    return found


def called(library: Any, address: str, model: str) -> dict[str, Any]:
    """Make each call, in one thread; returns its reply, or the status of its error."""
    with library.InferenceServerClient(address) as client:
        return _called(client, library, model)


def _called(client: Any, library: Any, model: str) -> dict[str, Any]:
    asked = inputs(library, "say one two three", max_tokens=2)
    calls: dict[str, Callable[[], Any]] = {
        "live": client.is_server_live,
        "ready": client.is_server_ready,
        "model ready": lambda: client.is_model_ready(model),
        "other ready": lambda: client.is_model_ready("nothing"),
        "server": client.get_server_metadata,
        "metadata": lambda: client.get_model_metadata(model),
        "config": lambda: client.get_model_config(model),
        "statistics": lambda: client.get_inference_statistics(model),
        "every statistic": client.get_inference_statistics,
        "index": client.get_model_repository_index,
        "infer": lambda: client.infer(model, asked, request_id="7").get_response(),
        "infer a version": lambda: client.infer(model, asked, model_version="1").get_response(),
        "no model": lambda: client.infer("nothing", asked),
        "no version": lambda: client.infer(model, asked, model_version="9"),
        "no metadata": lambda: client.get_model_metadata("nothing"),
        "no output": lambda: client.infer(model, asked, outputs=[library.InferRequestedOutput("logits")]),
    }
    return {name: replied(call) for name, call in calls.items()}


def replied(call: Callable[[], Any]) -> Any:
    try:
        reply = call()
    except InferenceServerException as error:
        return f"error {error.status()}"
    if hasattr(reply, "DESCRIPTOR"):
        reply = json_format.MessageToDict(
            reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
    return reply if isinstance(reply, bool) else shape(reply)


# What a Triton has and a tier of ours has no word for: kinds of devices, policies of versions, batches of the GPU.
NONE_OF_OURS = (
    "batch_input",
    "batch_output",
    "batch_stats",
    "cc_model_filenames",
    "default_model_filename",
    "dynamic_batching",
    "memory_usage",
    "metric_tags",
    "model_metrics",
    "model_warmup",
    "optimization",
    "response_stats",
    "runtime",
    "version_policy",
    "allow_ragged_batch",
    "is_shape_tensor",
    "is_non_linear_format_io",
    "label_filename",
    "format",
    "gpus",
    "host_policy",
    "passive",
    "profile",
    "rate_limiter",
    "secondary_devices",
    "max_model_len",
    "parameters.sequence",
    "[].reason",
    "[].version",
    "platform",
)


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    found = []
    for name, reply in theirs.items():
        found += [f"{name}{what}" for what in within(reply, ours[name])]
    return [what for what in found if not any(word in what for word in NONE_OF_OURS)]


async def test_replies_and_errors_are_those_of_a_triton(tmp_path: Path) -> None:
    port = unused_port()
    deps = gateway_deps()
    async with triton_server(tmp_path, "--allow-grpc=true", f"--grpc-port={port}") as triton:
        listener = GrpcListener(create_app(deps), GrpcSettings(enabled=True), ("127.0.0.1", 0), deps.limits)
        async with listener.running():
            with serving(gateway_deps()) as tier:
                pairs = (
                    (over_http, triton.url.removeprefix("http://"), f"127.0.0.1:{tier.port}"),
                    (over_grpc, f"127.0.0.1:{port}", f"127.0.0.1:{listener.port}"),
                )
                async with httpx.AsyncClient() as http:
                    await until_answered(lambda: ready(http, f"{triton.url}/v2/models/whole/ready"), 60)
                for library, there, here in pairs:
                    theirs = await asyncio.to_thread(called, library, there, "whole")
                    ours = await asyncio.to_thread(called, library, here, "tiny")
                    assert differences(theirs, ours) == [], library.__name__


async def test_generate_speaks_as_tritons_does(tmp_path: Path) -> None:
    async with triton_server(tmp_path) as triton, httpx.AsyncClient(timeout=30) as http:
        await until_answered(lambda: ready(http, f"{triton.url}/v2/models/counting/ready"), 60)
        with serving(gateway_deps()) as tier:
            found = {}
            for url, whole, streamed in ((triton.url, "whole", "counting"), (tier.url, "tiny", "tiny")):
                body = {"text_input": "slow one two three", "max_tokens": 3}
                one = await http.post(f"{url}/v2/models/{whole}/generate", json=body)
                stream = await http.post(f"{url}/v2/models/{streamed}/generate_stream", json=body)
                events = stream.text.strip().split("\n\n")
                lost = await http.post(f"{url}/v2/models/nothing/generate", json=body)
                wrong = await http.post(f"{url}/v2/models/{whole}/generate", json={"nothing": 1})
                found[url] = (
                    (one.status_code, sorted(one.json())),
                    (stream.status_code, stream.headers["content-type"].split(";")[0]),
                    all(event.startswith("data: {") for event in events) and len(events) >= 3,
                    (lost.status_code // 100, sorted(lost.json())),
                    (wrong.status_code, sorted(wrong.json())),
                )
    theirs, ours = found.values()
    assert ours == theirs


async def ready(http: httpx.AsyncClient, url: str) -> bool:
    return (await http.get(url)).status_code == 200
