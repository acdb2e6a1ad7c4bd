"""Where the servers of a backend are: a list, the addresses of a name, or the lines of a file."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from router.base.credentials import url_fault
from router.upstream.settings import BackendSettings

_SETTLED_S = 1.0
"""Who rewrites a file empties it first: one that was changed so lately may not be whole."""
_LOOKS = 10


class DiscoveryError(Exception):
    """It cannot be found out now; says why. The servers known so far stay. Never leaves this package."""


async def find_servers(backend: BackendSettings) -> list[str]:
    """Return the base URLs of a backend's servers, each once, in a stable order.

    Raises:
        DiscoveryError: the name does not resolve, or the file cannot be read, holds what is no URL, or never rests.
    """
    if backend.urls:
        return list(dict.fromkeys(_base(url) for url in backend.urls))
    if backend.dns:
        return await _resolved(backend.dns)
    return _listed(await _settled(backend.file), backend.file)


async def _resolved(url: str) -> list[str]:
    parts = urlsplit(url)
    port = parts.port or 80
    try:
        found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DiscoveryError(f"`{parts.hostname}` does not resolve: {error.strerror or error}") from error
    hosts = sorted({str(address[0]) for *_, address in found})
    netlocs = [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
    return [_base(urlunsplit((parts.scheme, netloc, parts.path, "", ""))) for netloc in netlocs]


async def _settled(file: str) -> str:
    """Return the text of a file that nobody has just changed; waits for that."""
    for _ in range(_LOOKS):
        text, age_s = await asyncio.to_thread(_read, file)
        if abs(age_s) >= _SETTLED_S:
            return text
        await asyncio.sleep(_SETTLED_S - abs(age_s))
    raise DiscoveryError(f"{file} changes all the time: write another file, and rename it")


def _read(file: str) -> tuple[str, float]:
    """Return the text of a file, and how many seconds ago it was changed."""
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        return text, time.time() - path.stat().st_mtime
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise DiscoveryError(f"cannot read {path}: {why}") from error


def _listed(text: str, file: str) -> list[str]:
    urls: dict[str, None] = {}
    for number, line in enumerate(text.splitlines(), 1):
        url = line.partition("#")[0].strip()
        if not url:
            continue
        fault = url_fault(url, "the backend's `api_key`")
        if fault:  # half a file, perhaps still being written, must not end servers that it does not name yet
            raise DiscoveryError(f"{file}:{number}: {fault}")
        urls[_base(url)] = None
    return list(urls)


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
