"""Where the servers of a backend are: listed, resolved, read from a file that may be half written."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from router.upstream.discovery import DiscoveryError, find_servers
from router.upstream.settings import BackendSettings


def backend(**where: Any) -> BackendSettings:
    return BackendSettings(name="b", **where)


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[tuple[Any, ...]]:
    """Let every name stand for these addresses; returns what is asked."""
    asked: list[tuple[Any, ...]] = []

    async def getaddrinfo(self: object, host: str, port: int, **more: Any) -> list[Any]:
        asked.append((host, port))
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kinds = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
        return [
            (kind, socket.SOCK_STREAM, 6, "", (address, port)) for kind, address in zip(kinds, addresses, strict=True)
        ]

    monkeypatch.setattr(asyncio.base_events.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return asked


async def test_listed_ones_once_each_and_without_the_path_that_sdks_want() -> None:
    found = await find_servers(backend(urls=("http://a:1/v1", "http://a:1", "http://b:2/", "http://c:3/models/v1")))
    assert found == ["http://a:1", "http://b:2", "http://c:3/models"]


async def test_a_headless_service_is_a_server_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolving(monkeypatch, "10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1")
    found = await find_servers(backend(dns="http://vllm.models.svc:8000/v1"))
    assert found == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
    assert asked == [("vllm.models.svc", 8000)]
    assert await find_servers(backend(dns="http://vllm")) == [
        "http://10.0.0.1:80",
        "http://10.0.0.2:80",
        "http://[fd00::1]:80",
    ]


async def test_a_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    resolving(monkeypatch)
    with pytest.raises(DiscoveryError, match=r"`vllm\.svc` does not resolve: Name or service not known"):
        await find_servers(backend(dns="http://vllm.svc:8000"))


async def test_a_file_holds_one_url_a_line(tmp_path: Path) -> None:
    listed = tmp_path / "servers"
    listed.write_text("# GPU boxes\nhttp://a:1  # the old one\n\n  http://b:2/v1\nhttp://a:1\n")
    assert await find_servers(backend(file=str(listed))) == ["http://a:1", "http://b:2"]
    listed.write_text("")
    assert await find_servers(backend(file=str(listed))) == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"http://a:1\nhttp:/", r"servers:2: "),
        (b"http://a:1\nhttp://key@b:2\n", r"servers:2: "),
        (b"http://a:1\n\xff\xfe", "no UTF-8"),
    ],
)
async def test_a_half_written_file_is_told_and_ends_no_server(tmp_path: Path, content: bytes, why: str) -> None:
    listed = tmp_path / "servers"
    listed.write_bytes(content)
    with pytest.raises(DiscoveryError, match=why) as raised:
        await find_servers(backend(file=str(listed)))
    assert "key@" not in str(raised.value)


async def test_a_file_that_is_just_rewritten_is_read_once_it_is_whole(tmp_path: Path) -> None:
    listed = tmp_path / "servers"
    listed.touch()
    soon_s = time.time() + 0.9  # a busy machine takes as long to look at it
    os.utime(listed, (soon_s, soon_s))
    finding = asyncio.create_task(find_servers(backend(file=str(listed))))
    await asyncio.sleep(0.05)
    listed.write_text("http://a:1\n")
    assert await finding == ["http://a:1"]


async def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DiscoveryError, match=r"cannot read .*nowhere: No such file"):
        await find_servers(backend(file=str(tmp_path / "nowhere")))
