"""The calls of Triton's own client examples, over HTTP and gRPC alike: `tritonclient.http` and `tritonclient.grpc`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import numpy as np
from checking import Checks, Server
from tritonclient.utils import InferenceServerException

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0}


class Caller:
    """One client, and how its inputs are built for a model as the server itself describes it."""

    def __init__(self, module: ModuleType, server: Server, client: Any) -> None:
        self.module, self.server, self.client = module, server, client
        self.model = server.whole_model
        self.headers = {"authorization": f"Bearer {server.key}"} if server.key else {}

    def metadata(self, model: str) -> dict[str, Any]:
        return plain(self.client.get_model_metadata(model, headers=self.headers))

    def inputs(self, model: str, prompts: list[str], tokens: int, **sets: Any) -> list[Any]:
        """Build the tensors of so many prompts, in the shapes that the model's metadata tells.

        Args:
            sets: `binary_data`, over HTTP.
        """
        shapes = {tensor["name"]: tensor["shape"] for tensor in self.metadata(model)["inputs"]}
        text = np.array([prompt.encode() for prompt in prompts], object)
        number = np.full(len(prompts), tokens, np.int32)
        built = []
        for name, kind, values in (("text_input", "BYTES", text), ("max_tokens", "INT32", number)):
            # [n, 1] where the model counts a batch in front of one element, else the elements themselves.
            shaped = values.reshape(-1, 1) if len(shapes[name]) == 2 else values
            tensor = self.module.InferInput(name, list(shaped.shape), kind)
            tensor.set_data_from_numpy(shaped, **sets)
            built.append(tensor)
        return built

    def infer(self, prompts: list[str], tokens: int, **options: Any) -> Any:
        """Ask the model for greedy answers to so many prompts."""
        built = self.inputs(self.model, prompts, tokens)
        return self.client.infer(self.model, built, headers=self.headers, parameters=GREEDY, **options)

    def texts(self, result: Any) -> list[str]:
        return [
            one.decode() if isinstance(one, bytes) else str(one) for one in result.as_numpy("text_output").reshape(-1)
        ]


def plain(told: Any) -> Any:
    """Return what HTTP brings as it is, and a message of gRPC as the same tree of plain values."""
    if isinstance(told, (dict, list)):
        return told
    from google.protobuf import json_format

    return json_format.MessageToDict(told, preserving_proto_field_name=True)


def health(caller: Caller) -> None:
    own = caller.headers
    assert caller.client.is_server_live(headers=own)
    assert caller.client.is_server_ready(headers=own)
    assert caller.client.is_model_ready(caller.model, headers=own)
    assert not caller.client.is_model_ready("no-such-model", headers=own)


def server_metadata(caller: Caller) -> None:
    told = plain(caller.client.get_server_metadata(headers=caller.headers))
    assert told["name"]
    assert told["version"]
    assert isinstance(told.get("extensions", []), list)


def model_metadata(caller: Caller) -> None:
    told = caller.metadata(caller.model)
    assert {tensor["name"]: tensor["datatype"] for tensor in told["inputs"]}["text_input"] == "BYTES"
    assert "text_output" in [tensor["name"] for tensor in told["outputs"]]
    assert all(tensor["shape"] for tensor in told["inputs"])


def model_config(caller: Caller) -> None:
    told = plain(caller.client.get_model_config(caller.model, headers=caller.headers))
    told = told.get("config", told)
    assert told["name"] == caller.model
    assert "text_input" in [tensor["name"] for tensor in told["input"]]
    assert int(told.get("max_batch_size", 0)) >= 0


def statistics(caller: Caller) -> None:
    def count() -> int:
        told = plain(caller.client.get_inference_statistics(caller.model, headers=caller.headers))
        stats = [one.get("inference_stats", {}) for one in told["model_stats"] if one["name"] == caller.model]
        return sum(int(one.get("success", {}).get("count", 0)) for one in stats)

    before = count()
    caller.infer([PROMPT], 2)
    assert count() == before + 1


def index(caller: Caller) -> None:
    told = plain(caller.client.get_model_repository_index(headers=caller.headers))
    listed = told if isinstance(told, list) else told["models"]
    assert {one["name"]: one.get("state") for one in listed}[caller.model] == "READY"


def infer(caller: Caller) -> None:
    (text,) = caller.texts(caller.infer([PROMPT], 5))
    # Triton's own model here counts words instead of knowing capitals.
    assert "Paris" in text or (text and not caller.server.ours), text


def batch(caller: Caller) -> None:
    texts = caller.texts(caller.infer([PROMPT, "The capital of Italy is", PROMPT], 5))
    assert len(texts) == 3
    assert texts[0] == texts[2]
    assert "Rome" in texts[1] or (texts[1] and not caller.server.ours), texts


def outputs(caller: Caller) -> None:
    chosen = [caller.module.InferRequestedOutput("text_output")]
    told = plain(caller.infer([PROMPT], 2, outputs=chosen, request_id="id-7").get_response())
    assert told["id"] == "id-7"
    assert [tensor["name"] for tensor in told["outputs"]] == ["text_output"]


def errors(caller: Caller) -> None:
    wrong = caller.module.InferInput("text_input", [1], "INT32")
    wrong.set_data_from_numpy(np.array([1], np.int32))
    for model in ("no-such-model", caller.model):
        said = ""
        try:
            caller.client.infer(model, [wrong], headers=caller.headers)
        except InferenceServerException as error:
            said = str(error)
        assert len(said) > 20, f"{model}: {said!r}"


CALLS: tuple[tuple[str, Callable[[Caller], None]], ...] = (
    ("server live and ready, model ready", health),
    ("server metadata", server_metadata),
    ("model metadata: inputs and outputs with shapes", model_metadata),
    ("model config", model_config),
    ("inference statistics count what was asked", statistics),
    ("repository index", index),
    ("infer: one prompt", infer),
    ("infer: a batch of prompts, answers in their order", batch),
    ("infer: chosen outputs, and the request's id comes back", outputs),
    ("errors: an unknown model, a wrong tensor: InferenceServerException with words", errors),
)


def add_checks(checks: Checks, opened: Callable[[Server], AbstractContextManager[Caller]]) -> None:
    """Add what is asked alike over both protocols.

    Args:
        opened: a connected client.
    """
    for what, call in CALLS:
        _add(checks, opened, what, call)


def _add(
    checks: Checks,
    opened: Callable[[Server], AbstractContextManager[Caller]],
    what: str,
    call: Callable[[Caller], None],
) -> None:
    @checks.that(what)
    def asked(server: Server) -> None:
        with opened(server) as caller:
            call(caller)
