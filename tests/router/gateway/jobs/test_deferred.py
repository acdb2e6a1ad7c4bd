"""Requests that may be deferred: answered at once where that is possible, kept where not, answered once, told of."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
from aiohttp import web

from router.base.errors import ConfigError
from router.jobs.calendar import Calendar
from router.jobs.settings import JobsSettings
from router.jobs.webhook import key_of
from tests.support.job_tier import SETTINGS, Echo, JobTier, ended, job_tier, line, submit
from tests.support.waiting import until, until_answered

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ALLOW = {"x-overspill-defer": "allow", "x-overspill-ttft-slo-ms": "200"}


def _body(text: str, **more) -> dict:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


async def _ask(tier: JobTier, text: str, key: str = "", body: dict | None = None, **more: str) -> httpx.Response:
    headers = ALLOW | {name.replace("_", "-"): value for name, value in more.items()}
    if key:
        headers["authorization"] = f"Bearer {key}"
    async with httpx.AsyncClient(base_url=tier.url, timeout=30) as http:
        return await http.post("/v1/chat/completions", json=body or _body(text), headers=headers)


async def _get(tier: JobTier, path: str, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=tier.url, timeout=30) as http:
        return await http.get(path, headers=headers)


async def _answered(tier: JobTier, path: str) -> dict:
    async def look() -> dict | None:
        reply = await _get(tier, path)
        return reply.json() if reply.status_code == 200 else None

    return await until_answered(look, every_s=0.05)


def _off(replica: Echo, tier: JobTier, available: bool = False) -> None:
    replica.available = available
    tier.dispatcher.capacity_changed()


async def test_what_can_be_served_is_answered_at_once(tmp_path: Path) -> None:
    async with job_tier(tmp_path) as (tier, _):
        reply = await _ask(tier, "hello")
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["message"]["content"] == "hello"
        assert (await _get(tier, "/v1/deferred")).json()["data"] == []


async def test_what_cannot_is_kept_and_answered_once_it_can(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (tier, _):
        _off(replica, tier)
        reply = await _ask(tier, "hello", x_overspill_min_quality="0.5", x_overspill_priority="7")
        assert reply.status_code == 202
        told = reply.json()
        assert (told["object"], told["status"], told["response"]) == ("deferred", "queued", None)
        assert told["deferred_for"]["code"] == "unavailable"
        assert reply.headers["location"] == f"/v1/deferred/{told['id']}"
        assert "retry-after" in reply.headers
        waiting = await _get(tier, reply.headers["location"])
        assert (waiting.status_code, waiting.json()["status"]) == (202, "queued")
        _off(replica, tier, available=True)
        later = await _answered(tier, reply.headers["location"])
        assert later["status"] == "completed"
        assert later["response"]["status_code"] == 200
        assert later["response"]["body"]["choices"][0]["message"]["content"] == "hello"
        assert replica.asked == ["hello"]
        asked = replica.requests[0].objective
        assert (asked.priority, asked.min_quality, asked.ttft_s, asked.defer) == (-1, 0.5, None, False)
        assert (await _answered(tier, reply.headers["location"])) == later  # fetched as often as one likes
        async with httpx.AsyncClient(base_url=tier.url) as http:
            assert (await http.delete(reply.headers["location"])).json()["deleted"] is True
            assert (await http.get(reply.headers["location"])).status_code == 404


async def test_what_cannot_be_kept_is_refused_as_without_asking(tmp_path: Path) -> None:
    """A field that nobody reads may hold a number that is none: it is written nowhere."""
    replica = Echo()
    async with job_tier(tmp_path, replica) as (tier, _), httpx.AsyncClient(base_url=tier.url) as http:
        _off(replica, tier)
        body = json.dumps(_body("hello")).encode()[:-1] + b',"mine":1e999}'
        reply = await http.post("/v1/chat/completions", content=body, headers=ALLOW)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
        assert (await _get(tier, "/v1/deferred")).json()["data"] == []


async def test_an_overloaded_tier_defers_what_would_be_late(tmp_path: Path) -> None:
    replica = Echo(slots=1)
    async with job_tier(tmp_path, replica) as (tier, _):
        replica.gate.clear()
        busy = asyncio.create_task(_ask(tier, "first"))
        await until(lambda: replica.running)
        reply = await _ask(tier, "second")
        assert reply.status_code == 202
        replica.gate.set()
        assert (await busy).status_code == 200
        later = await _answered(tier, reply.headers["location"])
        assert later["response"]["body"]["choices"][0]["message"]["content"] == "second"


async def test_without_the_header_the_refusal_stands(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (tier, client):
        _off(replica, tier)
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(
                **_body("x"), extra_headers={"x-overspill-ttft-slo-ms": "100", "x-overspill-deadline-ms": "300"}
            )
        known = tier.dispatcher.replicas
        tier.dispatcher.set_replicas([])  # nothing is known yet, of models neither
        wrong = await _ask(tier, "x", x_overspill_locality="here")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-overspill-locality")
        tier.dispatcher.set_replicas(known)
        for wrong in (
            await _ask(tier, "x", x_overspill_defer="yes"),
            await _ask(tier, "x", x_overspill_defere="allow"),
        ):
            assert wrong.status_code == 400
            assert "x-overspill-defer" in wrong.json()["error"]["message"]
        invalid = await _ask(tier, "x", body=_body("x", temperature=9))
        assert invalid.status_code == 400
        assert (await _get(tier, "/v1/deferred")).json()["data"] == []


async def test_asking_again_under_the_same_id_is_one_asking(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (tier, _):
        _off(replica, tier)
        first = await _ask(tier, "hello", x_request_id="mine-1")
        again = await _ask(tier, "hello", x_request_id="mine-1")
        other = await _ask(tier, "something else", x_request_id="mine-1")
        assert first.json()["id"] == again.json()["id"] != other.json()["id"]
        _off(replica, tier, available=True)
        later = await _answered(tier, first.headers["location"])
        await _answered(tier, other.headers["location"])
        late = await _ask(tier, "hello", x_request_id="mine-1")
        assert late.status_code == 200
        assert late.json() == later
        assert sorted(replica.asked) == ["hello", "something else"]


async def test_a_message_of_anthropics_api_is_tried_again_while_the_tier_is_full(tmp_path: Path) -> None:
    """It is told 529 where others are told 429 or 503, which was taken for its answer."""
    replica = Echo()
    async with job_tier(tmp_path, replica) as (tier, _), httpx.AsyncClient(base_url=tier.url, timeout=30) as http:

        def full() -> float | None:
            names = {"route": "messages", "status": "529"}
            return tier.telemetry.registry.get_sample_value("overspill_gateway_responses_total", names)

        _off(replica, tier)
        reply = await http.post("/v1/messages", json=_body("hello", max_tokens=9), headers=ALLOW)
        assert reply.status_code == 202
        known = tier.dispatcher.replicas
        tier.dispatcher.set_replicas([])
        await until(full)
        tier.dispatcher.set_replicas(known)
        _off(replica, tier, available=True)
        later = await _answered(tier, reply.headers["location"])
        assert (later["status"], later["response"]["status_code"]) == ("completed", 200)
        assert later["response"]["body"]["content"] == [{"type": "text", "text": "hello"}]


async def test_a_stream_is_answered_whole_later(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (tier, _):
        _off(replica, tier)
        body = _body("hello", stream=True, stream_options={"include_usage": True})
        reply = await _ask(tier, "", body=body)
        assert reply.status_code == 202
        _off(replica, tier, available=True)
        later = await _answered(tier, reply.headers["location"])
        assert later["response"]["body"]["object"] == "chat.completion"


async def test_a_later_mistake_is_told_as_the_reply_that_it_is(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica) as (tier, _):
        _off(replica, tier)
        reply = await _ask(tier, "word " * 5000)  # longer than the window, which nobody knows while it is off
        if reply.status_code == 202:
            _off(replica, tier, available=True)
            later = await _answered(tier, reply.headers["location"])
            assert later["status"] == "failed"
            assert later["response"]["body"]["error"]["code"] == "context_length_exceeded"
        else:
            assert reply.status_code == 400


async def test_deferred_requests_survive_a_restart_and_others_do_not_see_them(tmp_path: Path) -> None:
    keys = {"a" * 20: 0, "b" * 20: 0}
    replica = Echo()
    async with job_tier(tmp_path, replica, api_keys=keys) as (tier, _):
        _off(replica, tier)
        reply = await _ask(tier, "hello", key="a" * 20)
        path = reply.headers["location"]
        assert (await _get(tier, path, "b" * 20)).status_code == 404
        assert (await _get(tier, "/v1/deferred", "b" * 20)).json()["data"] == []
    async with job_tier(tmp_path, Echo(), api_keys=keys) as (tier, _):

        async def look() -> bool:
            return (await _get(tier, path, "a" * 20)).status_code == 200

        await until_answered(look, every_s=0.05)
        assert [item["id"] for item in (await _get(tier, "/v1/deferred", "a" * 20)).json()["data"]] == [path[13:]]


async def test_what_waits_too_long_is_given_up_and_later_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.jobs.jobs._CLEAN_UP_S", 0.05)
    monkeypatch.setattr("router.jobs.deferring._LOOK_S", 0.05)
    now_s, replica = [1_000_000.0], Echo()
    async with job_tier(tmp_path, replica, calendar=Calendar(lambda: now_s[0], lambda: now_s[0])) as (tier, _):
        _off(replica, tier)
        path = (await _ask(tier, "hello")).headers["location"]
        now_s[0] += 24 * 3600 + 1
        later = await _answered(tier, path)
        assert (later["status"], later["response"]) == ("expired", None)
        now_s[0] += 24 * 3600 + 1

        async def gone() -> bool:
            return (await _get(tier, path)).status_code == 404

        await until_answered(gone, every_s=0.05)
        assert replica.asked == []


async def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    replica = Echo()
    async with job_tier(tmp_path, replica, settings=JobsSettings(min_free_mbytes=0, max_deferred=2)) as (tier, _):
        _off(replica, tier)
        assert [(await _ask(tier, f"{n}")).status_code for n in range(3)] == [202, 202, 503]
        async with httpx.AsyncClient(base_url=tier.url, timeout=30) as http:
            told = await http.post("/v1/messages", json=_body("x", max_tokens=9), headers=ALLOW)
            assert (told.status_code, told.json()["error"]["type"]) == (529, "overloaded_error")


@contextlib.asynccontextmanager
async def receiver(failures: int) -> AsyncIterator[tuple[str, list]]:
    """A webhook's receiver that fails at first."""
    seen: list = []

    async def take(request: web.Request) -> web.Response:
        seen.append((dict(request.headers), await request.read()))
        return web.Response(status=500 if len(seen) <= failures else 204)

    application = web.Application()
    application.router.add_post("/hook", take)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/hook", seen
    finally:
        await runner.cleanup()


async def test_a_webhook_is_told_until_it_has_taken_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.jobs.webhook._LOOK_S", 0.02)
    monkeypatch.setattr("router.jobs.webhook._FIRST_RETRY_S", 0.02)
    replica = Echo()
    async with receiver(failures=2) as (url, seen):
        settings = msgspec.structs.replace(SETTINGS, webhook_url=url, webhook_secret=SECRET)
        async with job_tier(tmp_path, replica, settings=settings) as (tier, client):
            _off(replica, tier)
            deferred_id = (await _ask(tier, "hello")).json()["id"]
            _off(replica, tier, available=True)
            await until(lambda: len(seen) == 3)
            await until(lambda: tier.jobs.webhook.told == 1)
            assert len({headers["webhook-id"] for headers, _ in seen}) == 1  # by which it is once for the receiver
            headers, body = seen[-1]
            client.webhooks.verify_signature(body.decode(), headers, secret=SECRET)
            with pytest.raises(openai.InvalidWebhookSignatureError):
                client.webhooks.verify_signature(body.decode() + " ", headers, secret=SECRET)
            event = json.loads(body)
            assert event["id"] == headers["webhook-id"]
            assert event["type"] == "deferred.completed"
            assert event["data"]["id"] == deferred_id
            assert event["data"]["response"]["body"]["choices"][0]["message"]["content"] == "hello"


@pytest.mark.parametrize("drips", ["head", "body"])
async def test_a_receiver_that_never_ends_its_reply_holds_up_nothing(
    drips: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_LOOK_S", 0.02), ("_FIRST_RETRY_S", 0.02), ("_TIMEOUT_S", 0.3)):
        monkeypatch.setattr(f"router.jobs.webhook.{name}", seconds)
    calls = left = 0

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls, left
        calls += 1
        writer.write(b"HTTP/1.1 200 OK\r\n" + (b"content-length: 999999\r\n\r\n" if drips == "body" else b""))
        with contextlib.suppress(OSError):
            while not writer.is_closing():
                writer.write(b"x-a: b\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)
            await writer.wait_closed()
        left += 1

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
        settings = msgspec.structs.replace(SETTINGS, webhook_url=url, webhook_secret=SECRET)
        async with job_tier(tmp_path, settings=settings) as (tier, client):
            await submit(client, [line("a", "x")])
            if drips == "body":  # what follows the head says nothing
                await until(lambda: tier.jobs.webhook.told == 1)
            else:
                await until(lambda: calls >= 2)
                assert "no reply within" in tier.jobs.webhook.fault
        await until(lambda: left == calls)


async def test_events_that_were_not_told_are_told_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.jobs.webhook._LOOK_S", 0.02)
    monkeypatch.setattr("router.jobs.webhook._FIRST_RETRY_S", 0.02)
    settings = msgspec.structs.replace(SETTINGS, webhook_url="http://127.0.0.1:9/hook", webhook_secret=SECRET)
    async with job_tier(tmp_path, settings=settings) as (tier, client):
        batch = await submit(client, [line("a", "x")])
        await ended(client, batch.id)
        await until(lambda: tier.jobs.webhook.fault)
    async with receiver(failures=0) as (url, seen):
        settings = msgspec.structs.replace(settings, webhook_url=url)
        async with job_tier(tmp_path, settings=settings) as (_, client):
            await until(lambda: seen)
            headers, body = seen[0]
            event = client.webhooks.unwrap(body.decode(), headers, secret=SECRET)
            assert (event.type, event.data.id) == ("batch.completed", batch.id)


def test_a_secret_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="base64"):
        key_of("whsec_not base64")
    assert key_of("whsec_aGVsbG8=") == b"hello"
