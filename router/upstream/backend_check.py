"""One look at the servers of a `[[backends]]` entry: what `overspill edge check` and `cloud check` say of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence

import httpx
import msgspec

from router.base.config import file_of
from router.base.credentials import secret
from router.base.errors import in_words
from router.base.json_input import UNREADABLE
from router.base.tls import client_context
from router.upstream.discovery import DiscoveryError, find_servers
from router.upstream.settings import BackendSettings

_SERVED_SHOWN = 8


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card]


def backend_lines(
    backends: Sequence[BackendSettings], environ: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, str]]:
    """Yield lines, each after its label: `backend`, `warning`, or nothing for more of the same.

    Whatever the servers answer now, a tier would start, and find them when they come.

    Raises:
        ConfigError: a key is not set, or a TLS file is wrong.
    """
    for entry in backends:
        key = secret(entry.api_key, f"backends.{entry.name}.api_key", environ)
        tls = client_context(file_of(entry.ca_file), file_of(entry.client_cert), file_of(entry.client_key))
        where = entry.dns or entry.file
        yield "backend", f"{entry.name}: {entry.kind}, {where or f'{len(entry.urls)} server(s)'}"
        try:
            urls = asyncio.run(find_servers(entry))
        except DiscoveryError as error:
            yield "warning", f"backend {entry.name}: {error}"
            continue
        if not urls:
            yield "warning", f"backend {entry.name}: {where} lists no server now"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(verify=tls, headers=headers, trust_env=False, timeout=entry.connect_timeout_s) as client:
            for url in urls:
                fault, serves = _look(client, url, entry)
                yield ("warning", f"backend {entry.name}: {url} {fault}") if fault else ("", f"{url} {serves}")


def _look(client: httpx.Client, url: str, entry: BackendSettings) -> tuple[str, str]:
    """Return what is wrong with a server, or else what it serves."""
    path = "/v2/health/ready" if entry.kind == "kserve" else "/v1/models"
    try:
        reply = client.get(url + path)
    except httpx.HTTPError as error:
        return f"cannot be reached now ({in_words(error)})", ""
    if reply.status_code in {401, 403}:
        return f"does not accept the backend's api_key (HTTP {reply.status_code})", ""
    if reply.status_code != 200:
        return f"answers HTTP {reply.status_code} to {path}: is it loading, or no server of this kind?", ""
    return ("", "is ready") if entry.kind == "kserve" else _serves(reply.content, entry)


def _serves(cards: bytes, entry: BackendSettings) -> tuple[str, str]:
    try:
        served = [card.id for card in msgspec.json.decode(cards, type=_Cards).data]
    except UNREADABLE:
        return "has a list of models that cannot be read: is it a server of OpenAI's API?", ""
    missing = sorted({model.served for model in entry.models} - set(served))
    if missing:
        return f"does not serve {', '.join(missing)}; it has {_shown(served)}", ""
    return "", f"serves {_shown(served)}"


def _shown(served: Sequence[str]) -> str:
    more = len(served) - _SERVED_SHOWN
    return ", ".join(sorted(served)[:_SERVED_SHOWN]) + (f" and {more} more" if more > 0 else "") or "nothing yet"
