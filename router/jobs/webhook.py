"""Tells a webhook of what has ended: at least once, signed, under an id by which the receiver makes it exactly once.

Signed as the Standard Webhooks specification says (standardwebhooks.com), which OpenAI's SDKs check
(`client.webhooks.unwrap`): HMAC-SHA256 over `id.timestamp.body` with the secret's bytes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from functools import partial

import httpx
import structlog
from sqlalchemy import Connection

from router.base.build import user_agent
from router.base.clock import Clock
from router.base.errors import ConfigError, in_words
from router.base.timers import end, within
from router.base.tls import client_context
from router.jobs import events
from router.jobs.database import Database
from router.jobs.errors import StorageFailed
from router.jobs.records import Event

log = structlog.get_logger("router.jobs")

_LOOK_S = 1.0
_AT_ONCE = 16
_AGAIN_AT_ONCE = 12  # of those that failed before: what is new does not wait for what a receiver hangs on
_TIMEOUT_S = 15.0
_FIRST_RETRY_S = 1.0
_MOST_RETRY_S = 300.0
_PREFIX = "whsec_"


class Webhook:
    """Use as `async with`, inside that of the database.

    Args:
        url: where to POST.
        secret: as `whsec_` and base64, or any text.
        wall: Unix time, in seconds.

    Attributes:
        fault: why the last attempt failed; empty if it did not.
    """

    def __init__(self, url: str, secret: str, database: Database, clock: Clock, wall: Callable[[], float]) -> None:
        self._url = url
        self._key = key_of(secret)
        self._database = database
        self._clock = clock
        self._wall = wall
        self._news = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[bool]] = {}  # by event
        self._again: set[str] = set()  # those of them that failed before
        self.told = 0
        self.fault = ""

    async def __aenter__(self) -> Webhook:
        self._http = httpx.AsyncClient(
            headers={"user-agent": user_agent()}, verify=client_context(None, None, None), timeout=_TIMEOUT_S
        )
        self._task = asyncio.create_task(self._run(), name="jobs webhook")
        return self

    async def __aexit__(self, *error: object) -> None:
        await end(self._task, *self._tasks.values())
        await self._http.aclose()

    async def _run(self) -> None:
        while True:
            self._news.clear()
            try:
                await self._begin()
            except StorageFailed as error:
                self.fault = error.message
            except Exception:  # the task's boundary: what was not told is told again
                log.exception("webhook crashed")
            timer = asyncio.get_running_loop().call_later(_LOOK_S, self._news.set)
            await self._news.wait()
            timer.cancel()

    async def _begin(self) -> None:
        """Begin to tell what is due, as far as there is room: what is new first."""
        for is_new, most in ((True, _AT_ONCE), (False, _AGAIN_AT_ONCE - len(self._again))):
            room = min(most, _AT_ONCE - len(self._tasks))
            if room <= 0:
                continue
            due = await self._database.run(partial(self._due, is_new, room))
            for event in due:
                if not is_new:
                    self._again.add(event.id)
                self._tasks[event.id] = task = asyncio.create_task(self._tell(event), name=f"tell {event.id}")
                task.add_done_callback(partial(self._done, event.id))

    def _due(self, is_new: bool, limit: int, connection: Connection) -> list[Event]:
        return events.due(connection, self._wall(), _MOST_RETRY_S, limit, is_new=is_new, but=list(self._tasks))

    def _done(self, event_id: str, task: asyncio.Task[bool]) -> None:
        self._tasks.pop(event_id, None)
        self._again.discard(event_id)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, StorageFailed):
            self.fault = error.message  # it is told again a second later
        elif error is not None:
            log.error("webhook crashed", event_id=event_id, exc_info=error)
        elif not task.cancelled() and task.result():
            self._news.set()  # not where it failed: a receiver that is down is not sent one after the other at once

    async def _tell(self, event: Event) -> bool:
        """Tell of one; returns whether it was taken."""
        why = await self._post(event)
        if not why:
            await self._database.run(partial(_taken, event.id))
            self.told += 1
            self.fault = ""
            return True
        if why != self.fault:
            log.warning("webhook not told", event_id=event.id, why=why)
        self.fault = why
        due_s = self._wall() + min(_FIRST_RETRY_S * 2 ** min(event.tries, 30), _MOST_RETRY_S)
        await self._database.run(lambda c: events.put_off(c, event.id, due_s))
        return False

    async def _post(self, event: Event) -> str:
        """Send it; returns why it was not taken."""
        headers = {"content-type": "application/json", **signed(self._key, event.id, int(self._wall()), event.body)}
        try:
            return await within(_TIMEOUT_S, self._send(event.body, headers))
        except asyncio.TimeoutError:
            return f"no reply within {_TIMEOUT_S:g} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return in_words(error)

    async def _send(self, body: bytes, headers: dict[str, str]) -> str:
        """Send a body, and read no more of the reply than its head; returns why it was not taken."""
        async with self._http.stream("POST", self._url, content=body, headers=headers) as reply:
            return "" if reply.is_success else f"HTTP {reply.status_code}"


def key_of(secret: str) -> bytes:
    """Return the bytes that a secret stands for.

    Raises:
        ConfigError: it begins with `whsec_`, and no base64 follows.
    """
    if not secret.startswith(_PREFIX):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(
            "jobs.webhook_secret: after `whsec_` base64 is expected, as `openssl rand -base64 24` makes it",
            param="jobs.webhook_secret",
        ) from None


def signed(key: bytes, event_id: str, now_s: int, body: bytes) -> dict[str, str]:
    """Return the headers that say who sent a body, and when."""
    digest = hmac.new(key, f"{event_id}.{now_s}.".encode() + body, hashlib.sha256).digest()
    signature = base64.b64encode(digest).decode()
    return {"webhook-id": event_id, "webhook-timestamp": str(now_s), "webhook-signature": f"v1,{signature}"}


def _taken(event_id: str, connection: Connection) -> None:
    events.taken(connection, event_id)
