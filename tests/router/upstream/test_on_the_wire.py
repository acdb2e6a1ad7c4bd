"""What somebody hears who listens between a tier and a server of another maker."""

from __future__ import annotations

import json
from typing import Any

import httpx
from aiohttp import web

from tests.router.upstream.test_backend import entry
from tests.support.foreign_server import ForeignServer
from tests.support.passed_chain import passing
from tests.support.waiting import until

OWN_KEY = "key-of-the-backend"
PROMPT_TOKENS = 91
CALLERS = {
    "authorization": "Bearer key-of-the-caller",
    "cookie": "session=secret",
    "baggage": "user=alice",
    "x-secret": "secret",
    "user-agent": "secret/1.0",
    "referer": "http://localhost/secret",
    "openai-organization": "org-secret",
    "idempotency-key": "secret",
    "x-stainless-retry-count": "0",
    "x-overspill-session": "secret",
    "x-overspill-deadline-ms": "60000",
    "x-overspill-priority": "0",
    "x-request-id": "heard",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
}
FORWARDED = {"x-request-id": "heard", "traceparent": CALLERS["traceparent"]}
OUR_OWN = {"host", "user-agent", "accept", "accept-encoding", "authorization", "connection"}


class Heard(ForeignServer):
    """Notes the head of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.heads: list[tuple[str, list[tuple[str, str]]]] = []

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        lines = [(name.decode().lower(), value.decode()) for name, value in request.raw_headers]
        self.heads.append((request.path, lines))
        return await super()._serve(request)


async def test_a_backend_hears_the_question_and_nothing_of_who_asks() -> None:
    server = Heard()
    async with server:
        backend = entry(urls=(server.url,), api_key=OWN_KEY)
        async with passing(backend) as (edge, _), httpx.AsyncClient(base_url=edge.url, timeout=20) as http:
            for path, question in (
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/responses", {"input": "hi"}),
            ):
                of_alice = {"user": "alice", "metadata": {"of": "alice"}, "safety_identifier": "alice"}
                reply = await http.post(path, json={"model": "m", **of_alice, **question}, headers=CALLERS)
                assert reply.status_code == 200, reply.text
            await until(lambda: len(server.bodies) == 3)
    for path, lines in server.heads:
        names = [name for name, _ in lines]
        told = dict(lines)
        assert len(names) == len(told), f"{path}: {names}"
        assert told["user-agent"].startswith("overspill/"), path
        assert told["authorization"] == f"Bearer {OWN_KEY}", path
        asked = path.startswith("/v1/") and path != "/v1/models"
        expected = OUR_OWN | ({*FORWARDED, "content-type", "content-length"} if asked else set())
        assert set(told) <= expected, f"{path}: {set(told) - expected}"
        assert told.items() >= (FORWARDED.items() if asked else set()), path
        assert "secret" not in str(told), path
    assert "alice" not in str(server.bodies)


class Counting(ForeignServer):
    """Tells with each event how long the prompt is, as vLLM does where it is asked to."""

    @staticmethod
    async def _send(reply: web.StreamResponse, event: dict[str, Any]) -> None:
        told = event.get("usage", {}).get("completion_tokens", 1)
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": told}
        await ForeignServer._send(reply, {**event, "usage": usage})


async def test_the_length_of_the_prompt_is_the_same_on_each_hop_and_in_each_event() -> None:
    """Neither tier has the model's tokenizer: what they estimate is nobody's usage once the server has counted."""
    server = Counting()
    streamed = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **streamed}
    async with server:
        backend = entry(urls=(server.url,))
        async with passing(backend) as tiers:
            for tier in tiers:
                async with httpx.AsyncClient(base_url=tier.url, timeout=20) as http:
                    reply = await http.post("/v1/chat/completions", json=asked)
                events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
                told = [json.loads(event)["usage"]["prompt_tokens"] for event in events]
                assert len(told) >= 4
                assert set(told) == {PROMPT_TOKENS}, told
