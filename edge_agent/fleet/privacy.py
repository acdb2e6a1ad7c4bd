"""What the fleet said about privacy, kept apart from everything else it said.

One word in a file of its own: `local-only` while a document that keeps every request on this device is in force, `any`
while none is. It is written before such a document is applied and rewritten after it was taken away, so a crash between
the two leaves the stricter word. What is there and cannot be read counts as `local-only`.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from edge_agent.fleet.state import write_atomically
from router.policy.registry import POLICIES, load_policy
from router.values.request import Locality

log = structlog.get_logger("edge_agent.fleet")

PRIVATE_POLICY = "local-only"
_NAME = "privacy"


class Said(enum.Enum):
    """What the record says."""

    NOTHING = "nothing"
    ANY = "any"
    LOCAL_ONLY = "local-only"
    UNREADABLE = "unreadable"


_CONTENT = {b"any\n": Said.ANY, b"local-only\n": Said.LOCAL_ONLY}


def keeps_local(policy: object) -> bool:
    """Whether a policy of this name lets no request leave the device."""
    return isinstance(policy, str) and policy in POLICIES and load_policy(policy).locality is Locality.LOCAL_ONLY


def asks_local(overrides: Mapping[str, Any]) -> bool:
    """Whether a document's overrides keep every request on the device."""
    router = overrides.get("router")
    return isinstance(router, Mapping) and keeps_local(router.get("policy"))


@dataclass(slots=True)
class PrivacyRecord:
    """The record in a state folder.

    Attributes:
        fault: why the last `write` failed, empty if it did not.
    """

    folder: Path
    fault: str = ""
    _written: bool | None = None

    def read(self) -> Said:
        """Read it; a disk that fails counts as unreadable."""
        try:
            said = _CONTENT.get((self.folder / _NAME).read_bytes(), Said.UNREADABLE)
        except FileNotFoundError:
            return Said.NOTHING
        except OSError as error:
            log.warning("the privacy record cannot be read", path=str(self.folder / _NAME), error=str(error))
            return Said.UNREADABLE
        if said is not Said.UNREADABLE:
            self._written = said is Said.LOCAL_ONLY
        return said

    def write(self, local_only: bool) -> bool:
        """Replace it; False if the disk would not take the word.

        A word of `local-only` that finds no room cuts the old one to nothing instead: that needs no room, and what
        cannot be read counts as `local-only`.
        """
        if self._written is local_only:
            self.fault = ""
            return True
        path = self.folder / _NAME
        try:
            write_atomically(path, b"local-only\n" if local_only else b"any\n")
        except OSError as error:
            log.warning("the privacy record could not be written", path=str(path), error=str(error))
            self.fault, self._written = str(error), None
            if local_only:
                self._cut(path)
            return False
        self.fault, self._written = "", local_only
        return True

    @staticmethod
    def _cut(path: Path) -> None:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as error:
            log.error("local-only will not survive a restart", path=str(path), error=str(error))  # noqa: TRY400
            return
        try:
            os.fsync(file)
        finally:
            os.close(file)
