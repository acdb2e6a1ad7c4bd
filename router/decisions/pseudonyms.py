"""Names of callers in the decision file: keyed hashes, so that requests of one session are seen to belong together.

The key is a file of its own beside the log. Whoever gets a log without its key cannot even try out names.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
from pathlib import Path

import msgspec

from router.base.errors import ConfigError
from router.decisions.line import Decision

_KEY_BYTES = 32
_DIGEST_BYTES = 9
# An id of this form was drawn at random, by this tier or by a client library: it names nobody. A tier marks an id that
# is in flight twice with `~2`.
_RANDOM_ID = re.compile(r"[0-9a-f]{32}(~\d+)?|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(~\d+)?", re.IGNORECASE)
# Refusals that this tier words itself, from figures alone. Other texts may quote what an upstream said of a prompt.
_OWN_WORDS = frozenset({"promise_lost", "deadline_lost", "shed", "evicted"})
_OTHERS_WORDS = frozenset({"breaker-open", "unhealthy"})


def key_path(log: Path) -> Path:
    return log.with_name(f"{log.name}.key")


def _read(path: Path) -> bytes:
    """Return the key, empty where none was drawn yet, or where the disk did not take the one that was."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def _drawn(path: Path) -> bytes:
    """Draw a key, unless another process does so first."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        if not os.fstat(fd).st_size:
            os.write(fd, secrets.token_bytes(_KEY_BYTES))
            os.fsync(fd)
    finally:
        os.close(fd)
    return path.read_bytes()


class Pseudonyms:
    """Hides who sent a request, and every text that others have worded.

    Args:
        key: 32 random bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def open(cls, log: Path) -> Pseudonyms:
        """Read the key of a log; the first call draws it.

        Raises:
            ConfigError: it is none.
            OSError: it can be neither read nor written.
        """
        path = key_path(log)
        key = _read(path) or _drawn(path)
        if len(key) != _KEY_BYTES:
            raise ConfigError(
                f"{path}: the key of the decision file has {len(key)} bytes, not {_KEY_BYTES}; remove it, and names in "
                "new lines will be hashed with a new one"
            )
        return cls(key)

    def request_id(self, name: str) -> str:
        """Hash a request id, unless it was drawn at random and names nobody."""
        return name if _RANDOM_ID.fullmatch(name) else self._hashed("id", name)

    def hide(self, decision: Decision) -> Decision:
        """Return a decision as it may be written to a file."""
        features = decision.features
        hidden = msgspec.structs.replace(
            features,
            session=None if features.session is None else self._hashed("session", features.session),
            caller=self._hashed("caller", features.caller) if features.caller else None,
        )
        sent = any(event["event"] == "sent" for event in decision.events)
        return msgspec.structs.replace(
            decision,
            request_id=self.request_id(decision.request_id),
            features=hidden,
            candidates=tuple(
                msgspec.structs.replace(row, why=None) if row.rejected in _OTHERS_WORDS else row
                for row in decision.candidates
            ),
            events=tuple({key: value for key, value in event.items() if key != "error"} for event in decision.events),
            error=decision.error if decision.error_code in _OWN_WORDS and not sent else None,
        )

    def _hashed(self, kind: str, name: str) -> str:
        digest = hashlib.blake2b(
            name.encode(errors="surrogateescape"), key=self._key, person=kind.encode(), digest_size=_DIGEST_BYTES
        )
        return f"h-{digest.hexdigest()}"
