"""Obeys `desired` documents: decode, reconcile, put into force, remember on disk, and know what to report."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from edge_agent.fleet import reconcile
from edge_agent.fleet.reconcile import Apply, Drop, Handled, Knowledge, Refuse, Verdict
from edge_agent.fleet.state import StateDir
from router.base.errors import ConfigError
from router.base.timers import within
from router.fleetwire.documents import DesiredConfig, DesiredRefused, Reported, ReportedState, decode_desired, digest_of

log = structlog.get_logger("edge_agent.fleet")

ApplyDesired = Callable[[DesiredConfig], Awaitable[None] | None]
"""Puts a document into force as a whole or raises `ConfigError` and leaves everything as it was.

A plain function runs on the event loop and must be quick; an async one may take up to `apply_timeout_s`.
"""

_PROVEN_ATTEMPTS = 5
"""A document that was in force before is tried this often when the agent ends while it is applied at the start."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What to report: the document handled last, and the version in force."""

    state: ReportedState = "none"
    version: int | None = None
    digest: str = ""
    reason: str = ""
    key: str = ""
    applied_version: int | None = None
    applied_digest: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def reported(self, **more: Any) -> Reported:
        return Reported(
            state=self.state,
            version=self.version,
            digest=self.digest,
            reason=self.reason,
            key=self.key,
            applied_version=self.applied_version,
            applied_digest=self.applied_digest,
            overrides=dict(self.overrides),
            **more,
        )


@dataclass(slots=True)
class Configurator:
    """One at a time: `obey` is called from one task only.

    Attributes:
        standing: what to report now.
        on_change: called whenever `standing` has changed or is worth saying again.
    """

    apply: ApplyDesired
    state: StateDir
    apply_timeout_s: float
    on_change: Callable[[], Awaitable[None]]
    standing: Standing = field(default_factory=Standing)
    _known: Knowledge = field(default_factory=Knowledge)

    async def restore(self) -> None:
        """Put the last good document into force again, so that a restart needs no broker."""
        self._known = reconcile.restarted(await asyncio.to_thread(self.state.load))
        good = self._known.applied
        if good is None:
            return
        handled = Handled(good.version, digest_of(good), Verdict.APPLIED)
        trial = self._known.trial
        attempts = trial.attempts if trial is not None and trial.digest == handled.digest else 0
        if attempts >= _PROVEN_ATTEMPTS:
            reason = f"the agent ended {attempts} times while it applied version {good.version} at its start"
            log.error("the stored overrides are not applied", version=good.version, reason=reason)
            self._stand(good.version, handled.digest, reason)
            return
        error = await self._try(Apply(good, reconcile.Trial(good.version, handled.digest, attempts + 1)))
        if error is not None:
            log.error(
                "the stored overrides no longer apply; the file is in force", version=good.version, reason=str(error)
            )
            self._stand(good.version, handled.digest, error.message, error.param or "")
            return
        await self._remember(replace(self._known, trial=None))
        self._stand_applied(good, handled.digest)
        log.info("the stored overrides are in force", version=good.version)

    async def obey(self, payload: bytes) -> None:
        """Deal with one document, whatever it holds."""
        if not payload:
            log.warning("the retained desired document was cleared; the configuration in force stays")
            return
        try:
            desired = decode_desired(payload)
        except DesiredRefused as error:
            log.warning("a desired document was refused", version=error.version, reason=error.message)
            self._stand(error.version, "", error.message, error.param or "")
            await self.on_change()
            return
        action = reconcile.reconcile(self._known, desired)
        if isinstance(action, Apply):
            await self._carry_out(action)
        elif isinstance(action, Refuse):
            await self._refuse(action)
        elif isinstance(action, Drop):
            log.warning("a desired document was dropped", version=action.version, reason=action.reason)
            self._stand(action.version, action.digest, action.reason)
        elif self._known.handled is not None:
            self._stand_as(self._known.handled)
        await self.on_change()

    async def _carry_out(self, action: Apply) -> None:
        desired = action.desired
        self.standing = replace(
            self.standing, state="applying", version=desired.version, digest=action.trial.digest, reason="", key=""
        )
        error = await self._try(action)
        if error is not None:
            await self._refuse(Refuse(desired.version, action.trial.digest, error.message, error.param or ""))
            return
        await self._remember(reconcile.applied(self._known, desired))
        self._stand_applied(desired, action.trial.digest)
        log.info("a desired document is in force", version=desired.version, issued_by=desired.issued_by or None)

    async def _try(self, action: Apply) -> ConfigError | None:
        """Apply; None if it is in force now, else why not."""
        before = self._known
        announce = asyncio.get_running_loop().call_later(1.0, self._announce)
        try:
            await self._remember(reconcile.begin(before, action))
            result = self.apply(action.desired)
            if inspect.isawaitable(result):
                await within(self.apply_timeout_s, _outcome(result))
        except asyncio.CancelledError:
            await self._remember(before)  # the agent is told to end: that is no fault of the document
            raise
        except ConfigError as error:
            return error
        except asyncio.TimeoutError:
            return ConfigError(f"not in force after {self.apply_timeout_s:g} s; given up")
        except Exception as error:
            # The boundary between a stranger's document and the agent: logged, reported to the operator, never fatal.
            log.exception("applying a desired document failed", version=action.desired.version)
            return ConfigError(f"internal error while applying: {type(error).__name__}: {error}")
        finally:
            announce.cancel()
        return None

    def _announce(self) -> None:
        task = asyncio.ensure_future(self.on_change())
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    async def _refuse(self, refusal: Refuse) -> None:
        log.warning("a desired document was refused", version=refusal.version, key=refusal.key, reason=refusal.reason)
        await self._remember(reconcile.refused(self._known, refusal))
        self._stand(refusal.version, refusal.digest, refusal.reason, refusal.key)

    async def _remember(self, known: Knowledge) -> None:
        """Write it to the disk, completely also when cancelled: what is written next comes after it."""
        self._known = known
        writing = asyncio.ensure_future(asyncio.to_thread(self.state.save, known))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait({writing})
            raise

    def _stand(self, version: int | None, digest: str, reason: str, key: str = "") -> None:
        self.standing = replace(self.standing, state="refused", version=version, digest=digest, reason=reason, key=key)

    def _stand_applied(self, desired: DesiredConfig, digest: str) -> None:
        self.standing = Standing(
            "applied",
            desired.version,
            digest,
            applied_version=desired.version,
            applied_digest=digest,
            overrides=desired.overrides,
        )

    def _stand_as(self, handled: Handled) -> None:
        """Say again what became of the document handled last, unless it could not be restored at the start."""
        if handled.verdict is Verdict.REFUSED:
            self._stand(handled.version, handled.digest, handled.reason, handled.key)
        elif self._known.applied is not None and self.standing.applied_version == handled.version:
            self._stand_applied(self._known.applied, handled.digest)


async def _outcome(result: Awaitable[None]) -> None:
    await result
