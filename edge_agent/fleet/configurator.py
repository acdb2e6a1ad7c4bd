"""Obeys `desired` documents: decode, reconcile, put into force, remember on disk, and know what to report."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import structlog

from edge_agent.fleet import reconcile
from edge_agent.fleet.privacy import PRIVATE_POLICY, PrivacyRecord, Said, asks_local
from edge_agent.fleet.reconcile import Apply, Drop, Handled, Knowledge, Refuse, Report, Trial, Verdict
from edge_agent.fleet.restore import restore_each
from edge_agent.fleet.state import StateDir
from router.base.errors import ConfigError, in_words
from router.base.timers import within
from router.fleetwire.documents import (
    DesiredConfig,
    DesiredRefused,
    Reported,
    ReportedState,
    decode_desired,
    digest_of,
)
from router.fleetwire.overrides import lay_over

log = structlog.get_logger("edge_agent.fleet")

ApplyDesired = Callable[[DesiredConfig], Awaitable[None] | None]
"""Puts a document into force as a whole or raises `ConfigError` and leaves everything as it was.

A plain function runs on the event loop and must be quick; an async one may take up to `apply_timeout_s`.
"""

_PROVEN_ATTEMPTS = 5
"""A document that was in force before is tried this often when the agent ends while it is applied at the start."""
_SAVE_AGAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What to report: the document that came last, what is in force, and what of it a restart would lose.

    Attributes:
        volatile: why the disk does not hold what is in force; empty if it does.
        privacy_held: why every request stays on the device until a document says otherwise; empty if none is held.
    """

    state: ReportedState = "none"
    version: int | None = None
    digest: str = ""
    reason: str = ""
    key: str = ""
    applied_version: int | None = None
    applied_digest: str = ""
    handled_version: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    volatile: str = ""
    privacy_held: str = ""

    def reported(self, **more: Any) -> Reported:
        volatile = self.state == "applied" and self.volatile
        return Reported(
            state="applied-volatile" if volatile else self.state,
            version=self.version,
            digest=self.digest,
            reason=f"in force, and lost at a restart: {self.volatile}" if volatile else self.reason,
            key=self.key,
            applied_version=self.applied_version,
            applied_digest=self.applied_digest,
            handled_version=self.handled_version,
            overrides=dict(self.overrides),
            privacy_held=self.privacy_held,
            **more,
        )


@dataclass(slots=True)
class Configurator:
    """One at a time: `obey` is called from one task only.

    Attributes:
        standing: what to report now.
        on_change: called whenever `standing` has changed.
    """

    apply: ApplyDesired
    state: StateDir
    apply_timeout_s: float
    on_change: Callable[[], Awaitable[None]]
    standing: Standing = field(default_factory=Standing)
    _known: Knowledge = field(default_factory=Knowledge)
    _local_only: bool = False
    _privacy: PrivacyRecord = field(init=False)
    _disk: asyncio.Lock = field(default_factory=asyncio.Lock)
    _unsaved: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._privacy = PrivacyRecord(self.state.path)

    async def restore(self) -> None:
        """Put what was in force into force again, so that a restart needs no broker; privacy above all.

        Raises:
            ConfigError: requests cannot be kept on the device although they have to be.
        """
        self._known = reconcile.restarted(await asyncio.to_thread(self.state.load))
        good = self._known.applied
        self._stand_with(handled_version=self._known.handled.version if self._known.handled is not None else 0)
        held = self._must_hold(await asyncio.to_thread(self._privacy.read), good)
        self._local_only = bool(held) or (good is not None and asks_local(good.overrides))
        await self._note_privacy(self._local_only)
        wanted = good.overrides if good is not None else {}
        if held:
            log.error("every request stays on this device until a document says otherwise", reason=held)
            self._stand_with(privacy_held=held)
            wanted = lay_over(wanted, {"router": {"policy": PRIVATE_POLICY}})
        if wanted:
            await self._restore(good, wanted)

    async def _restore(self, good: DesiredConfig | None, wanted: Mapping[str, Any]) -> None:
        """Put stored overrides into force: all at once, else each on its own, in twice `apply_timeout_s` at most.

        A document whose application ended the agent time and again is restored without its models.
        """
        version = good.version if good is not None else 1
        digest = digest_of(good) if good is not None else ""
        attempts = self._known.trial.attempts if self._known.trial and self._known.trial.digest == digest else 0
        trial = Trial(version, digest, attempts + 1)

        clock = asyncio.get_running_loop()
        begun_s = clock.time()

        async def attempt(overrides: Mapping[str, Any]) -> ConfigError | None:
            if "models" in overrides and clock.time() - begun_s > self.apply_timeout_s:
                return ConfigError(f"not tried: the stored overrides have taken {self.apply_timeout_s:g} s already")
            return await self._try(Apply(_document(version, overrides), trial))

        skip: dict[str, ConfigError] = {}
        error: ConfigError | None = None
        if attempts >= _PROVEN_ATTEMPTS:
            error = ConfigError(f"the agent ended {attempts} times while it applied version {version} at its start")
            skip = {"models": error}
        else:
            error = await attempt(wanted)
        if error is None:
            await self._remember(replace(self._known, trial=None))
            if good is None:
                self._stand_with(overrides=wanted)
            elif self.standing.privacy_held:
                self._stand_partial(good, self.standing.privacy_held, "router.policy", wanted)
            else:
                self._stand_applied(good, digest)
            log.info("the stored overrides are in force", version=version)
            return
        log.error("the stored overrides no longer apply as a whole", version=version, reason=error.message)
        restored = await restore_each(wanted, attempt, skip)
        if not skip:
            await self._remember(replace(self._known, trial=None))
        if self._local_only and not asks_local(restored.overrides):
            raise ConfigError(
                f"router.policy: requests have to stay on this device, and cannot be kept here: {restored.reason}",
                param="router.policy",
            )
        if good is not None:
            self._stand_partial(good, restored.reason, next(iter(restored.failed), ""), restored.overrides)
        log.warning("some of the stored overrides are in force", version=version, left_out=restored.reason)

    def _must_hold(self, said: Said, good: DesiredConfig | None) -> str:
        """Say why requests have to stay on the device although no document that can be read says so."""
        if good is not None and asks_local(good.overrides) and said is not Said.UNREADABLE:
            return ""
        if said is Said.UNREADABLE:
            return "what the fleet said about privacy cannot be read after a restart"
        if said is Said.LOCAL_ONLY:
            return "the fleet asked for local-only, and the document that did so cannot be read after a restart"
        if said is Said.NOTHING and self.state.damaged:
            return "the stored document cannot be read after a restart"
        return ""

    async def obey(self, payload: bytes) -> None:
        """Deal with one document, whatever it holds, and say so if anything changed."""
        before = self.standing
        if not payload:
            log.warning("the retained desired document was cleared; the configuration in force stays")
            return
        try:
            desired = decode_desired(payload)
        except DesiredRefused as error:
            log.warning("a desired document was refused", version=error.version, reason=error.message)
            self._stand(error.version, "", error.message, error.param or "")
        else:
            await self._settle(desired)
        if self.standing != before:
            await self.on_change()

    async def give_up(self, payload: bytes) -> None:
        """Say of a document that could not be dealt with, twice, that it is refused; what is in force stays."""
        try:
            version: int | None = decode_desired(payload).version
        except DesiredRefused as error:
            version = error.version
        self._stand(version, "", "internal error while dealing with the document; the device's log has the details")
        await self.on_change()

    async def _settle(self, desired: DesiredConfig) -> None:
        action = reconcile.reconcile(self._known, desired)
        if isinstance(action, Report) and self.standing.privacy_held and self._known.applied == desired:
            action = Apply(desired, Trial(desired.version, digest_of(desired), 1))  # the broker's word about privacy
        if isinstance(action, Apply):
            await self._carry_out(action)
        elif isinstance(action, Refuse):
            await self._refuse(action)
        elif isinstance(action, Drop):
            log.warning("a desired document was dropped", version=action.version, reason=action.reason)
            self._stand(action.version, action.digest, action.reason, "" if action.stale else "version")
            if action.stale:
                self._stand_with(state="stale")
        elif self._known.handled is not None:
            self._stand_as(self._known.handled)

    async def _carry_out(self, action: Apply) -> None:
        """Apply a document; its privacy is on the disk before it is in force, and leaves the disk after it has gone."""
        desired = action.desired
        local_only = asks_local(desired.overrides)
        self._stand_with(state="applying", version=desired.version, digest=action.trial.digest, reason="", key="")
        if local_only:
            await self._note_privacy(True)
        error = await self._try(action)
        if error is not None:
            await self._note_privacy(self._local_only)
            await self._refuse(Refuse(desired.version, action.trial.digest, error.message, error.param or ""))
            return
        await self._remember(reconcile.applied(self._known, desired))
        self._local_only = local_only
        await self._note_privacy(local_only)
        self._stand_with(privacy_held="")
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
            return ConfigError(f"internal error while applying: {in_words(error)}")
        finally:
            announce.cancel()
        return None

    def _announce(self) -> None:
        task = asyncio.ensure_future(self.on_change())
        task.add_done_callback(_note_failure)

    async def _refuse(self, refusal: Refuse) -> None:
        log.warning("a desired document was refused", version=refusal.version, key=refusal.key, reason=refusal.reason)
        await self._remember(reconcile.refused(self._known, refusal))
        self._stand(refusal.version, refusal.digest, refusal.reason, refusal.key)

    # What the disk holds.

    async def keep_saving(self) -> None:
        """Write again what the disk did not take, until it does; runs as long as the session."""
        while True:
            await self._unsaved.wait()
            await asyncio.sleep(_SAVE_AGAIN_S)
            await self.save_again()

    async def save_again(self) -> None:
        """Write what the disk did not take before, and say so once it has."""
        before = self.standing
        await self._remember(self._known)
        await self._note_privacy(self._local_only)
        if self.standing != before:
            log.info("the disk holds what is in force again", version=self.standing.applied_version)
            await self.on_change()

    async def _remember(self, known: Knowledge) -> None:
        self._known = known
        await self._write(lambda: self.state.save(known))
        self._stand_with(handled_version=known.handled.version if known.handled is not None else 0)

    async def _note_privacy(self, local_only: bool) -> None:
        await self._write(lambda: self._privacy.write(local_only))

    async def _write(self, save: Callable[[], bool]) -> None:
        """Write to the disk, completely also when cancelled: what is written next comes after it."""
        async with self._disk:
            writing = asyncio.ensure_future(asyncio.to_thread(save))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait({writing})
                raise
            finally:
                self._stand_with(volatile=self.state.fault or self._privacy.fault)
                if self.standing.volatile:
                    self._unsaved.set()
                else:
                    self._unsaved.clear()

    # What is told.

    def _stand_with(self, **changes: Any) -> None:
        self.standing = replace(self.standing, **changes)

    def _stand(self, version: int | None, digest: str, reason: str, key: str = "") -> None:
        self._stand_with(state="refused", version=version, digest=digest, reason=reason, key=key)

    def _stand_partial(self, good: DesiredConfig, reason: str, key: str, overrides: Mapping[str, Any]) -> None:
        self._stand(good.version, digest_of(good), reason, key)
        self._stand_with(state="partial" if overrides else "refused", overrides=overrides)

    def _stand_applied(self, desired: DesiredConfig, digest: str) -> None:
        self._stand_with(
            state="applied",
            version=desired.version,
            digest=digest,
            reason="",
            key="",
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


def _note_failure(done: asyncio.Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        log.warning("a change could not be reported yet", error=in_words(error))


def _document(version: int, overrides: Mapping[str, Any]) -> DesiredConfig:
    """Return stored overrides, or some of them, as a document to be applied."""
    return DesiredConfig(version=version, issued_at=datetime.now(timezone.utc), **overrides)


async def _outcome(result: Awaitable[None]) -> None:
    await result
