"""Servers that have chats alone, as many hosted APIs: raw completions keep nobody's chats away from them."""

from __future__ import annotations

import json

import httpx
import pytest
from aiohttp import web

from tests.router.gateway.test_media import CHAT, asking, world
from tests.support.foreign_server import ForeignServer
from tests.support.waiting import until_answered

RAW = "/v1/completions"
NO_PAGE = [
    (404, {"detail": "Not Found"}),
    (404, {"error": {"message": "Unknown request URL: POST /v1/completions", "code": "unknown_url"}}),
    (404, {"error": {"message": "This is a chat model and not supported in the v1/completions endpoint."}}),
    (405, {"detail": "Method Not Allowed"}),
]


def without_completions(status: int, body: dict[str, object]) -> ForeignServer:
    async def none_here(request: web.Request) -> web.StreamResponse:
        server.bodies.append(json.loads(await request.read()))
        return web.json_response(body, status=status)

    server = ForeignServer(owner="somebody")
    server.pages[RAW] = none_here
    return server


@pytest.mark.parametrize(("status", "body"), NO_PAGE)
async def test_raw_completions_are_refused_and_chats_go_on(status: int, body: dict[str, object]) -> None:
    server = without_completions(status, body)
    async with world(server) as (edge, cloud):
        for tier in (cloud, edge):
            async with httpx.AsyncClient(base_url=tier.url) as http:
                for number in range(8):
                    reply = await http.post(RAW, json={"model": "m", "prompt": f"Number {number}", "max_tokens": 4})
                    assert reply.status_code == 400, reply.text
                    chat = await http.post(CHAT, json=asking())
                    assert chat.status_code == 200, chat.text

        async with httpx.AsyncClient(base_url=cloud.url) as http:

            async def learnt() -> bool:
                reply = await http.post(RAW, json={"model": "m", "prompt": "Again", "max_tokens": 4})
                return "does not do what the request needs: raw completions" in reply.text

            await until_answered(learnt)
            asked = len(server.bodies)
            assert await learnt()
            assert len(server.bodies) == asked, "it is not asked what it does not have"
