"""A small server of KServe V2 with the extensions of Triton, for what a real one cannot be made to do on command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.tiers import Quiet
from tests.support.waiting import until


@dataclass
class Model:
    """One model; it answers each request with the words after those of its prompt: `w3 w4 …`.

    Attributes:
        pause: after the second word, until set.
    """

    state: str = "READY"
    reason: str = ""
    decoupled: bool = True
    inputs: dict[str, str] = field(default_factory=lambda: {"text_input": "BYTES", "max_tokens": "INT32"})
    outputs: dict[str, str] = field(default_factory=lambda: {"text_output": "BYTES"})
    config: dict[str, Any] = field(default_factory=lambda: {"instance_group": [{"count": 2}]})
    metadata: bytes | None = None
    pause: asyncio.Event | None = None
    fails: tuple[int, str] | None = None
    asked: list[dict[str, Any]] = field(default_factory=list)
    closed: int = 0

    def words(self, body: dict[str, Any]) -> list[str]:
        first = len(body["text_input"].split())
        count = int(body.get("max_tokens", body.get("parameters", {}).get("max_tokens", 4)))
        return [f" w{first + index}" for index in range(count)]


class TritonLike:
    """Use as `async with`.

    Attributes:
        indexes: whether it lists its models; `metrics`: what it exports.
    """

    def __init__(self, **models: Model) -> None:
        self.models = models
        self.name = "triton"
        self.indexes = True
        self.ready = 200
        self.metrics = ""
        self.keys: list[str | None] = []
        model = "/v2/models/{name}"
        routes = [
            Route("/v2", lambda _: JSONResponse({"name": self.name, "extensions": []})),
            Route("/v2/health/ready", self._health),
            Route("/v2/repository/index", self._index, methods=["POST"]),
            Route(f"{model}/ready", self._model_ready),
            Route(f"{model}/config", self._config),
            Route(model, self._metadata),
            Route(f"{model}/generate", self._generate, methods=["POST"]),
            Route(f"{model}/generate_stream", self._stream, methods=["POST"]),
            Route(f"{model}/infer", self._infer, methods=["POST"]),
            Route("/metrics", lambda _: PlainTextResponse(self.metrics)),
        ]
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off")
        self._server = Quiet(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> TritonLike:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        await until(lambda: self._server.started)
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cut()
        self._server.should_exit = True
        await self._task
        self._socket.close()

    def cut(self) -> None:
        """What the network sees when it is killed."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _health(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return Response(status_code=self.ready)

    async def _index(self, request: Request) -> Response:
        if not self.indexes:
            return JSONResponse({"error": "no such endpoint"}, 404)
        assert await request.json() == {}
        return JSONResponse(
            [{"name": name, "version": "1", "state": m.state, "reason": m.reason} for name, m in self.models.items()]
        )

    async def _model_ready(self, request: Request) -> Response:
        found = self.models.get(request.path_params["name"])
        return Response(status_code=200 if found is not None and found.state == "READY" else 400)

    async def _metadata(self, request: Request) -> Response:
        model = self.models.get(request.path_params["name"])
        if model is None:
            return JSONResponse({"error": "unknown model"}, 404)
        if model.metadata is not None:
            return Response(model.metadata)
        listed = [
            [{"name": name, "datatype": datatype, "shape": [1]} for name, datatype in tensors.items()]
            for tensors in (model.inputs, model.outputs)
        ]
        return JSONResponse({"name": request.path_params["name"], "inputs": listed[0], "outputs": listed[1]})

    async def _config(self, request: Request) -> Response:
        model = self.models[request.path_params["name"]]
        return JSONResponse({"model_transaction_policy": {"decoupled": model.decoupled}, **model.config})

    async def _asked(self, request: Request) -> tuple[Model, dict[str, Any]]:
        model, body = self.models[request.path_params["name"]], await request.json()
        model.asked.append(body)
        return model, body

    async def _generate(self, request: Request) -> Response:
        model, body = await self._asked(request)
        if model.fails is not None:
            return JSONResponse({"error": model.fails[1]}, model.fails[0])
        return JSONResponse({"model_name": "m", "text_output": "".join(model.words(body))})

    async def _infer(self, request: Request) -> Response:
        model, body = await self._asked(request)
        given = {tensor["name"]: tensor["data"][0] for tensor in body["inputs"]} | body.get("parameters", {})
        data = ["".join(model.words(given))]
        return JSONResponse({"outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": data}]})

    async def _stream(self, request: Request) -> Response:
        model, body = await self._asked(request)
        if model.fails is not None:
            return JSONResponse({"error": model.fails[1]}, model.fails[0])
        return StreamingResponse(_events(model, body), media_type="text/event-stream")


async def _events(model: Model, body: dict[str, Any]) -> AsyncIterator[bytes]:
    try:
        for index, word in enumerate(model.words(body)):
            if index == 2 and model.pause is not None:
                await model.pause.wait()
            yield b"data: " + json.dumps({"model_name": "m", "text_output": word}).encode() + b"\n\n"
            await asyncio.sleep(0)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            model.closed += 1
        raise
