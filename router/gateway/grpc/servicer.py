"""The methods of `inference.GRPCInferenceService`, each put to the HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeAlias

import grpc
import orjson
import structlog
from google.protobuf import json_format

from router.base.errors import InvalidRequest
from router.base.timers import end
from router.gateway.grpc import codec
from router.gateway.grpc.exchange import Answered, Exchange
from router.gateway.grpc.messages import SERVICE, load_messages
from router.wire.kserve.call import VERSION
from router.wire.kserve.request import HEADER_LENGTH

log = structlog.get_logger("router.gateway")

_AT_ONCE = 64  # requests of one stream that are answered side by side; the next waits to be read

Context: TypeAlias = Any  # a `grpc.aio.ServicerContext`, of a library without types


class Servicer:
    """Answers gRPC calls.

    Attributes:
        busy: calls, and requests of streams, being answered now; a stream on which nothing is asked is not busy.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._messages = load_messages()
        self.busy = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """Return what a server registers."""
        unary: dict[str, Callable[[Any, Context], Awaitable[Any]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "ModelInfer": self._model_infer,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_load,
            "RepositoryModelUnload": self._repository_unload,
        }
        found = {
            name: grpc.unary_unary_rpc_method_handler(
                self._counted(method),
                request_deserializer=self._messages[f"{name}Request"].FromString,
                response_serializer=self._messages[f"{name}Response"].SerializeToString,
            )
            for name, method in unary.items()
        }
        found["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._model_stream_infer,
            request_deserializer=self._messages["ModelInferRequest"].FromString,
            response_serializer=self._messages["ModelStreamInferResponse"].SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, found)

    def _counted(self, method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            with self._counting():
                try:
                    return await method(request, context)
                except InvalidRequest as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.message)

        return answer

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1

    # ── the server and its models ───────────────────────────────────────────────────────────────────────────────────

    async def _server_live(self, request: Any, context: Context) -> Any:  # noqa: ARG002
        return self._messages["ServerLiveResponse"](live=True)

    async def _server_ready(self, request: Any, context: Context) -> Any:  # noqa: ARG002
        found = await self._exchange.ask(context, "GET", "/v2/health/ready")
        return self._messages["ServerReadyResponse"](ready=found.status == 200)

    async def _server_metadata(self, request: Any, context: Context) -> Any:  # noqa: ARG002
        return await self._told(context, "GET", "/v2", "ServerMetadataResponse")

    async def _model_ready(self, request: Any, context: Context) -> Any:
        found = await self._exchange.ask(context, "GET", f"{_path(request.name, request.version)}/ready")
        if found.status not in {200, 404, 503}:
            await _abort(context, found)
        return self._messages["ModelReadyResponse"](ready=found.status == 200)

    async def _model_metadata(self, request: Any, context: Context) -> Any:
        return await self._told(context, "GET", _path(request.name, request.version), "ModelMetadataResponse")

    async def _model_config(self, request: Any, context: Context) -> Any:
        found = await self._asked(context, "GET", f"{_path(request.name, request.version)}/config")
        return self._read("ModelConfigResponse", {"config": orjson.loads(found.body)})

    async def _model_statistics(self, request: Any, context: Context) -> Any:
        path = f"{_path(request.name, request.version)}/stats" if request.name else "/v2/models/stats"
        return await self._told(context, "GET", path, "ModelStatisticsResponse")

    # ── the repository ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _repository_index(self, request: Any, context: Context) -> Any:
        body = orjson.dumps({"ready": True} if request.ready else {})
        found = await self._asked(context, "POST", "/v2/repository/index", body)
        return self._read("RepositoryIndexResponse", {"models": orjson.loads(found.body)})

    async def _repository_load(self, request: Any, context: Context) -> Any:
        await self._change(request, context, "load")
        return self._messages["RepositoryModelLoadResponse"]()

    async def _repository_unload(self, request: Any, context: Context) -> Any:
        await self._change(request, context, "unload")
        return self._messages["RepositoryModelUnloadResponse"]()

    async def _change(self, request: Any, context: Context, what: str) -> None:
        body = orjson.dumps({"parameters": codec.plain(request.parameters)}, default=repr)
        await self._asked(context, "POST", f"/v2/repository/models/{request.model_name}/{what}", body)

    # ── inference ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _model_infer(self, request: Any, context: Context) -> Any:
        body, head_bytes = codec.infer_body(request)
        path = f"{_path(request.model_name, request.model_version)}/infer"
        found = await self._asked(context, "POST", path, body, head_bytes)
        await context.send_initial_metadata(found.metadata)
        return codec.infer_response(self._messages, request, int(found.headers[HEADER_LENGTH]), found.body)

    async def _model_stream_infer(self, requests: AsyncIterator[Any], context: Context) -> None:
        """Answer the requests of a stream side by side; each response carries the id of its request."""
        writing = asyncio.Lock()
        running: set[asyncio.Task[None]] = set()
        # Who may not come in loses the stream, not one request after the other.
        await self._asked(context, "GET", "/v2")
        try:
            async for request in requests:
                task = asyncio.create_task(self._stream_one(request, context, writing), name="grpc stream")
                running.add(task)
                task.add_done_callback(running.discard)
                if len(running) >= _AT_ONCE:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*running)
        finally:
            await end(*running)

    async def _stream_one(self, request: Any, context: Context, writing: asyncio.Lock) -> None:
        async def write(response: Any) -> None:
            async with writing:
                await context.write(response)

        with self._counting():
            try:
                failed = await self._stream_answer(request, context, write)
            except InvalidRequest as error:
                failed = error.message
            except Exception:  # the task's boundary: its caller waits for a response to this request
                log.exception("request of a gRPC stream crashed", model=request.model_name[:200], id=request.id[:200])
                failed = "internal error"
            if failed:
                await write(codec.stream_error(self._messages, request, failed))

    async def _stream_answer(self, request: Any, context: Context, write: Callable[[Any], Awaitable[None]]) -> str:
        """Answer one request of a stream, in pieces or at once; returns why it failed.

        Raises:
            InvalidRequest: something is wrong with it.
        """
        path = _path(request.model_name, request.model_version)
        body = codec.generate_body(request)
        if body is None:
            return await self._stream_whole(request, context, path, write)
        events = _Events(lambda event: write(codec.stream_response(self._messages, request, event)))
        found = await self._exchange.ask(context, "POST", f"{path}/generate_stream", body, on_piece=events.take)
        return "" if found.status == 200 else _message(found)

    async def _stream_whole(
        self, request: Any, context: Context, path: str, write: Callable[[Any], Awaitable[None]]
    ) -> str:
        """Answer a request of a stream that asks for one response; returns why it failed."""
        body, head_bytes = codec.infer_body(request)
        found = await self._exchange.ask(context, "POST", f"{path}/infer", body, head_bytes=head_bytes)
        if found.status != 200:
            return _message(found)
        response = codec.infer_response(self._messages, request, int(found.headers[HEADER_LENGTH]), found.body)
        response.parameters[codec.FINAL].bool_param = True
        await write(self._messages["ModelStreamInferResponse"](infer_response=response))
        return ""

    # ── exchanges ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _asked(
        self, context: Context, method: str, path: str, body: bytes = b"", head_bytes: int | None = None
    ) -> Answered:
        """Put a request; one that fails ends the call."""
        found = await self._exchange.ask(context, method, path, body, head_bytes=head_bytes)
        if found.status != 200:
            await _abort(context, found)
        return found

    async def _told(self, context: Context, method: str, path: str, name: str) -> Any:
        found = await self._asked(context, method, path)
        return self._read(name, orjson.loads(found.body))

    def _read(self, name: str, told: dict[str, Any]) -> Any:
        return json_format.ParseDict(told, self._messages[name](), ignore_unknown_fields=True)


class _Events:
    """Server-sent events out of pieces."""

    def __init__(self, on_event: Callable[[Any], Awaitable[None]]) -> None:
        self._on_event = on_event
        self._left = b""

    async def take(self, piece: bytes) -> None:
        *events, self._left = (self._left + piece).split(b"\n\n")
        for event in events:
            await self._on_event(orjson.loads(event.removeprefix(b"data: ")))


def _path(model: str, version: str) -> str:
    return f"/v2/models/{model}/versions/{version or VERSION}"


def _message(found: Answered) -> str:
    try:
        told = orjson.loads(found.body)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"HTTP {found.status}"
    return told if isinstance(told, str) else str(told.get("message", told))


async def _abort(context: Context, found: Answered) -> None:
    await context.abort(found.code, _message(found), found.metadata)
