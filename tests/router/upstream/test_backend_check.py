"""What `overspill edge check` and `cloud check` say of backends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.base.errors import ConfigError
from router.upstream.backend_check import backend_lines
from router.upstream.settings import BackendModel, BackendSettings
from tests.support.foreign_server import ForeignServer
from tests.support.ports import refused_port


async def lines(**given: Any) -> list[tuple[str, str]]:
    entry = BackendSettings(**{"name": "b", **given})
    return await asyncio.to_thread(lambda: list(backend_lines([entry], {"KEY": "0123456789abcdef"})))


async def test_what_each_server_serves() -> None:
    async with ForeignServer(models=("m", "n")) as server:
        assert await lines(urls=(server.url,)) == [
            ("backend", "b: openai, 1 server(s)"),
            ("", f"{server.url} serves m, n"),
        ]
        wanted = (BackendModel(served="x"),)
        assert (await lines(urls=(server.url,), models=wanted))[1] == (
            "warning",
            f"backend b: {server.url} does not serve x; it has m, n",
        )
        server.pages["/v2/health/ready"] = {}
        assert (await lines(urls=(server.url,), kind="kserve"))[1] == ("", f"{server.url} is ready")


async def test_hundreds_of_models_are_not_all_named() -> None:
    async with ForeignServer(models=tuple(f"m{n:03}" for n in range(300))) as server:
        assert (await lines(urls=(server.url,)))[1][1].endswith("m006, m007 and 292 more")


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (503, "answers HTTP 503 to /v1/models: is it loading"),
        (404, "or no server of this kind?"),
        (401, "does not accept the backend's api_key (HTTP 401)"),
        (b"<html>", "cannot be read"),
        ({"data": [1]}, "cannot be read"),
        ({"data": []}, "nothing yet"),
    ],
)
async def test_what_is_wrong_with_one_is_said(page: Any, why: str) -> None:
    async with ForeignServer() as server:
        server.pages["/v1/models"] = page
        assert why in (await lines(urls=(server.url,), api_key="env:KEY"))[1][1]


async def test_one_that_is_away_or_not_to_be_found_is_a_warning(tmp_path: Path) -> None:
    with refused_port() as port:
        label, text = (await lines(urls=(f"http://127.0.0.1:{port}",)))[1]
    assert (label, "cannot be reached now (ConnectError" in text) == ("warning", True)
    label, text = (await lines(file=str(tmp_path / "none")))[1]
    assert label == "warning"
    assert "cannot read" in text
    (tmp_path / "empty").touch()
    assert (await lines(file=str(tmp_path / "empty")))[1][1].endswith("lists no server now")


async def test_a_key_that_is_not_set_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"backends\.b\.api_key"):
        await lines(urls=("http://a:1",), api_key="env:OTHER")
