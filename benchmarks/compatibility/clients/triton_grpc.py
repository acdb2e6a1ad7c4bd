"""NVIDIA's `tritonclient.grpc` with the calls of its examples."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc as client_module
from checking import Checks, Pieces, Server
from triton_calls import GREEDY, PROMPT, Caller, add_checks

checks = Checks(("tritonclient", "grpcio"))


@contextlib.contextmanager
def opened(server: Server) -> Iterator[Caller]:
    if not server.grpc:
        raise AssertionError("no gRPC port")
    client = client_module.InferenceServerClient(server.grpc)
    try:
        yield Caller(client_module, server, client)
    finally:
        client.close()


add_checks(checks, opened)


@checks.that("async_infer: four at once")
def at_once(server: Server) -> None:
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with opened(server) as caller:
        built = caller.inputs(server.whole_model, [PROMPT], 5)
        for _ in range(4):
            caller.client.async_infer(
                server.whole_model,
                built,
                callback=lambda result, error: done.put((result, error)),
                headers=caller.headers,
            )
        for _ in range(4):
            result, error = done.get(timeout=60)
            assert error is None, error
            assert caller.texts(result)[0]


@checks.that("stream infer: pieces over time, a final response")
def stream(server: Server) -> None:
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    pieces = Pieces()
    with opened(server) as caller:
        built = caller.inputs(server.stream_model, [PROMPT], 16)
        if "stream" in [tensor["name"] for tensor in caller.metadata(server.stream_model)["inputs"]]:
            built.append(asked := client_module.InferInput("stream", [1], "BOOL"))
            asked.set_data_from_numpy(np.array([True]))
        caller.client.start_stream(
            callback=lambda result, error: done.put((result, error)), headers=caller.headers, stream_timeout=60
        )
        caller.client.async_stream_infer(
            server.stream_model, built, request_id="s1", enable_empty_final_response=True, parameters=GREEDY
        )
        final = False
        while not final:
            result, error = done.get(timeout=60)
            assert error is None, error
            response = result.get_response()
            final = response.parameters["triton_final_response"].bool_param
            if response.outputs:
                pieces.add("".join(caller.texts(result)))
        caller.client.stop_stream()
    pieces.came_over_time()


checks.run()
