"""NVIDIA's `tritonclient.http` with the calls of its examples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tritonclient.http as client_module
from checking import Checks, Server
from triton_calls import PROMPT, Caller, add_checks

checks = Checks(("tritonclient",))


@contextlib.contextmanager
def opened(server: Server) -> Iterator[Caller]:
    client = client_module.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4)
    try:
        yield Caller(client_module, server, client)
    finally:
        client.close()


add_checks(checks, opened)


@checks.that("infer: JSON tensors (binary_data=False)")
def json_tensors(server: Server) -> None:
    with opened(server) as caller:
        built = caller.inputs(server.whole_model, [PROMPT], 5, binary_data=False)
        chosen = [client_module.InferRequestedOutput("text_output", binary_data=False)]
        result = caller.client.infer(server.whole_model, built, outputs=chosen, headers=caller.headers)
        assert caller.texts(result)[0]


@checks.that("async_infer: four at once")
def at_once(server: Server) -> None:
    with opened(server) as caller:
        built = caller.inputs(server.whole_model, [PROMPT], 5)
        asked = [caller.client.async_infer(server.whole_model, built, headers=caller.headers) for _ in range(4)]
        assert all(caller.texts(one.get_result())[0] for one in asked)


@checks.that("compressed bodies (gzip both ways)")
def compressed(server: Server) -> None:
    with opened(server) as caller:
        built = caller.inputs(server.whole_model, [PROMPT], 5)
        result = caller.client.infer(
            server.whole_model,
            built,
            headers=caller.headers,
            request_compression_algorithm="gzip",
            response_compression_algorithm="gzip",
        )
        assert caller.texts(result)[0]


checks.run()
