"""The jobs of a tier, from start to end: what the gateway asks of files and batches, and what works on them beside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import orjson
import structlog
from sqlalchemy import Connection

from router.base.clock import Clock
from router.base.errors import InvalidRequest
from router.base.timers import end
from router.jobs import batches, deferred, events
from router.jobs.calendar import Calendar
from router.jobs.call import Ask
from router.jobs.database import Database
from router.jobs.deferring import Deferring
from router.jobs.errors import QuotaReached, StorageFailed
from router.jobs.files import Files, Incoming
from router.jobs.folder import locked, place_of
from router.jobs.lifecycle import Lifecycle
from router.jobs.pages import Page
from router.jobs.records import (
    BATCH_PURPOSE,
    Asking,
    Batch,
    BatchStatus,
    Deferred,
    DeferredStatus,
    StoredFile,
    new_id,
)
from router.jobs.runner import Runner
from router.jobs.settings import JobsSettings, window_s
from router.jobs.slack import Replicas, Slack
from router.jobs.webhook import Webhook
from router.values.status import JobsStatus

log = structlog.get_logger("router.jobs")

T = TypeVar("T")

_CLEAN_UP_S = 60.0
_DAY_S = 86_400
_HOUR_S = 3_600
_RETRY_S = 60.0


class Jobs:
    """Use as `async with`, inside the lifetime of the dispatcher; `serve` begins to run lines.

    Args:
        replicas: what computes lines.
        database: the URL in force; empty is SQLite in `settings.dir`.
        webhook_secret: the secret in force.
        calendar: tells what is late.
        max_line_bytes: of one request of a batch.

    Attributes:
        slack: to be told of every online request.
    """

    def __init__(
        self,
        settings: JobsSettings,
        clock: Clock,
        replicas: Replicas,
        *,
        database: str = "",
        webhook_secret: str = "",
        calendar: Calendar | None = None,
        max_line_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self.settings = settings
        self.slack = Slack(replicas, clock, settings.concurrency, settings.beside_slowdown)
        self._clock = clock
        self._calendar = calendar or Calendar()
        self._wall = self._calendar.now_s
        self._folder = Path(settings.dir).expanduser()
        self._url = database
        self._webhook_secret = webhook_secret
        self._lock: IO[str] | None = None
        self._files = Files(self._folder, settings)
        self._max_line_bytes = max_line_bytes
        self._runner: Runner | None = None
        self._deferring: Deferring | None = None
        self._webhook: Webhook | None = None
        self._held_bytes = 0

    async def __aenter__(self) -> Jobs:
        """Open everything.

        Raises:
            ConfigError: the folder or the database cannot be used.
        """
        self._stack = contextlib.AsyncExitStack()
        async with contextlib.AsyncExitStack() as opening:
            opening.callback(self._unlock)
            url = self._url or f"sqlite:///{self._folder / 'jobs.sqlite'}"
            self._database = Database(url, self._place, self._files.set_aside)
            opening.callback(self._database.close)
            try:
                await asyncio.to_thread(self._database.open)
            except StorageFailed as error:  # others are served all the same: a bad disk is no reason to stay away
                log.warning("files, batches and deferred requests wait for their database", why=error.message)
            self._lifecycle = Lifecycle(self._database, self._files, self.settings, self._wall, self._max_line_bytes)
            following = self._calendar.follow(self._database, self._clock, self._look)
            for name, work in (("clean-up", self._clean_up()), ("calendar", following)):
                opening.push_async_callback(end, asyncio.create_task(work, name=f"jobs {name}"))
            self._stack = opening.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _place(self) -> str:
        """Take the folder, once, and make it ready."""
        if self._lock is None:
            self._lock = locked(self._folder)
        self._files.prepare()
        return place_of(self._folder)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    async def serve(self, ask: Ask) -> None:
        """Begin to run lines, until the end."""
        runner = Runner(self._database, self._lifecycle, self.slack, self._clock, ask)
        self._runner = await self._stack.enter_async_context(runner)
        url = self.settings.webhook_url
        deferring = Deferring(self._database, self._clock, self._wall, ask, webhook=url)
        self._deferring = await self._stack.enter_async_context(deferring)
        if url:
            webhook = Webhook(url, self._webhook_secret, self._database, self._clock, self._wall)
            self._webhook = await self._stack.enter_async_context(webhook)

    async def stop(self) -> None:
        """Run no lines any more; those that run are stopped, and run again after the next start."""
        if self._runner is not None:
            await self._runner.stop()
        if self._deferring is not None:
            await self._deferring.stop()

    # ── files ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def begin_file(self, owner: str, size_bytes: int) -> Incoming:
        """Begin to take in a file, of which `size_bytes` are announced.

        Raises:
            QuotaReached: the caller keeps too much already.
            StorageFailed: there is no room, or it cannot be written.
        """
        await self._database.run(lambda c: self._files.require_room(c, owner, size_bytes))
        return self._files.begin(new_id("upload-", self._wall()))

    async def keep_file(self, incoming: Incoming, owner: str, filename: str, keep_s: int | None) -> StoredFile:
        """Keep what was received; it is on the disk when this returns.

        Raises:
            QuotaReached, StorageFailed: as above.
        """
        now_s = self._wall()
        expires_s = int(now_s) + (int(self.settings.keep_days * _DAY_S) if keep_s is None else keep_s)
        file_id = new_id("file-", now_s)
        file = StoredFile(file_id, owner, BATCH_PURPOSE, filename, incoming.bytes, int(now_s), expires_s)
        await asyncio.to_thread(incoming.flush)

        def keep(connection: Connection) -> StoredFile:
            self._files.require_room(connection, owner, incoming.bytes)
            return self._files.keep(connection, incoming, file)

        return await self._files.keeping(self._database, keep)

    async def file(self, owner: str, file_id: str) -> StoredFile:
        return await self._database.run(lambda c: self._files.get(c, owner, file_id))

    def path_of(self, file: StoredFile) -> Path:
        """Return where its bytes are."""
        return self._files.path(file.id)

    async def list_files(self, owner: str, page: Page, purpose: str | None) -> tuple[list[StoredFile], bool]:
        return await self._database.run(lambda c: self._files.list_page(c, owner, page, purpose))

    async def delete_file(self, owner: str, file_id: str) -> None:
        await self._database.run(lambda c: self._files.delete(c, owner, file_id))
        self._files.unlink(file_id)

    # ── batches ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_batch(
        self,
        owner: str,
        input_file_id: str,
        endpoint: str,
        window: str,
        *,
        labels: Mapping[str, str],
        headers: Sequence[tuple[str, str]],
        keep_output_s: int | None = None,
    ) -> Batch:
        """Make a batch; its lines are checked and run from now on.

        Raises:
            NoSuchJob: the caller has no such file.
            InvalidRequest: the file or the window is not for a batch.
            QuotaReached: the caller has too many batches that run.
        """
        now_s = self._wall()
        batch = Batch(
            id=new_id("batch_", now_s),
            owner=owner,
            status=BatchStatus.VALIDATING,
            endpoint=endpoint,
            input_file_id=input_file_id,
            window=window,
            created_s=int(now_s),
            expires_s=int(now_s) + window_s(window),
            labels=orjson.dumps(dict(labels)).decode(),
            headers=orjson.dumps([list(line) for line in headers]).decode(),
            keep_output_s=keep_output_s,
        )
        await self._database.run(partial(self._add, batch))
        self._look()
        return batch

    def _add(self, batch: Batch, connection: Connection) -> None:
        file = self._files.get(connection, batch.owner, batch.input_file_id)
        if file.purpose != BATCH_PURPOSE:
            raise InvalidRequest(
                f"file `{file.id}` has the purpose `{file.purpose}`: upload one with `{BATCH_PURPOSE}`",
                param="input_file_id",
            )
        most = self.settings.max_caller_batches
        if batches.count_running(connection, batch.owner) >= most:
            raise QuotaReached(
                f"{most} batches of yours have not ended, the most of one caller", retry_after_s=_RETRY_S
            )
        batches.add(connection, batch)

    async def batch(self, owner: str | None, batch_id: str) -> Batch:
        return await self._database.run(lambda c: batches.get(c, owner, batch_id))

    async def list_batches(self, owner: str | None, page: Page) -> tuple[list[Batch], bool]:
        return await self._database.run(lambda c: batches.list_page(c, owner, page))

    async def cancel_batch(self, owner: str | None, batch_id: str) -> Batch:
        """Cancel: no further line begins, those that run are stopped, and what was answered is kept.

        Raises:
            NoSuchJob: there is no such batch of this caller.
            InvalidRequest: it has ended, or is about to.
        """
        now_s = int(self._wall())

        def cancel(connection: Connection) -> Batch:
            batch = batches.get(connection, owner, batch_id)
            if batch.status is BatchStatus.CANCELLING:
                return batch
            before = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
            if not batches.move(connection, batch_id, now_s, BatchStatus.CANCELLING, *before):
                raise InvalidRequest(f"batch `{batch_id}` is {batch.status.value}: it cannot be cancelled any more")
            return batches.get(connection, owner, batch_id)

        batch = await self._database.run(cancel)
        self._look()
        return batch

    # ── deferred requests ──────────────────────────────────────────────────────────────────────────────────────────

    async def defer(self, owner: str, request: Asking, why: Mapping[str, str]) -> Deferred:
        """Keep a request that cannot be served now; it is on the disk when this returns.

        Raises:
            QuotaReached, StorageFailed: there is no room for it.
        """
        now_s = self._wall()
        kept = Deferred(
            id=new_id("deferred_", now_s),
            owner=owner,
            asked=request.asked,
            status=DeferredStatus.QUEUED,
            path=request.path,
            request_id=request.request_id,
            headers=orjson.dumps([list(line) for line in request.headers]).decode(),
            body=request.body,
            why=orjson.dumps(dict(why)).decode(),
            created_s=int(now_s),
            expires_s=int(now_s + self.settings.deferred_hours * _HOUR_S),
        )

        def keep(connection: Connection) -> Deferred:
            self._files.require_room(connection, owner, deferred.held_bytes(connection, owner) + len(request.body))
            return deferred.add(connection, kept, self.settings.max_deferred)

        found = await self._database.run(keep)
        if self._deferring is not None:
            self._deferring.look()
        return found

    async def find_deferred(self, asked: str) -> Deferred | None:
        """Return what is kept of an asking."""
        return await self._database.run(lambda c: deferred.find(c, asked))

    async def deferred(self, owner: str, deferred_id: str) -> Deferred:
        return await self._database.run(lambda c: deferred.get(c, owner, deferred_id))

    async def list_deferred(self, owner: str, page: Page) -> tuple[list[Deferred], bool]:
        return await self._database.run(lambda c: deferred.list_page(c, owner, page))

    async def forget_deferred(self, owner: str, deferred_id: str) -> None:
        """Forget a deferred request; one that waits is not answered any more."""
        await self._database.run(lambda c: deferred.remove(c, owner, deferred_id))
        if self._deferring is not None:
            self._deferring.forget(deferred_id)

    # ── beside ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def runner(self) -> Runner | None:
        """What runs lines; None before `serve`."""
        return self._runner

    @property
    def deferring(self) -> Deferring | None:
        """What answers deferred requests; None before `serve`."""
        return self._deferring

    @property
    def webhook(self) -> Webhook | None:
        """What tells of it elsewhere; None where there is none."""
        return self._webhook

    @property
    def held_bytes(self) -> int:
        """What files and answers take, as measured last."""
        return self._held_bytes

    def status(self) -> JobsStatus:
        """Return what an operator is told of it."""
        runner, deferring, webhook = self._runner, self._deferring, self._webhook
        return JobsStatus(
            batches={} if runner is None else dict(runner.batches),
            lines_running=0 if runner is None else runner.running,
            held="" if runner is None else runner.held,
            deferred=0 if deferring is None else deferring.waiting,
            held_bytes=self._held_bytes,
            webhook_fault="" if webhook is None else webhook.fault,
            database_fault=self._database.fault,
        )

    def _look(self) -> None:
        if self._runner is not None:
            self._runner.look()

    async def _clean_up(self) -> None:
        while True:
            try:
                for file_id in await self._database.run(lambda c: self._expire(c, self._wall())):
                    self._files.unlink(file_id)
                await self._database.run(self._files.sweep)
                self._held_bytes = await self._database.run(self._measure)
                self._lifecycle.measured(self._held_bytes)
            except StorageFailed as error:
                log.warning("jobs are not cleaned up", why=error.message)
            except Exception:  # the task's boundary: the next round may succeed
                log.exception("clean-up of jobs crashed")
            await self._clock.sleep(_CLEAN_UP_S)

    def _expire(self, connection: Connection, now_s: float) -> list[str]:
        batches.expire(connection, now_s - self.settings.keep_days * _DAY_S)
        deferred.forget(connection, now_s - self.settings.deferred_hours * _HOUR_S)
        given_up = events.forget(connection, now_s - self.settings.deferred_hours * _HOUR_S)
        if given_up:
            log.warning("events given up: the webhook took none of them in time", events=given_up)
        return self._files.expire(connection, now_s)

    def _measure(self, connection: Connection) -> int:
        answers = batches.answers_bytes(connection) + deferred.held_bytes(connection)
        return self._files.held_bytes(connection) + answers
