"""The `[jobs]` table of either tier: files, batches and what runs them."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from router.base.credentials import url_fault
from router.base.errors import InvalidRequest

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Megabytes = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]

_WINDOW = re.compile(r"([0-9]{1,8})(s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_WINDOW_S = 30 * 86_400


class JobsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[jobs]`. It is read at start; sizes are in MB of 1,000,000 bytes.

    Attributes:
        dir: the folder that holds files and, without a `database`, what is known of them; one tier alone uses it.
            Empty: there are no jobs.
        database: an SQLAlchemy URL, of this tier alone, e.g. `postgresql+psycopg://…`; `env:NAME` is read from the
            environment; empty is SQLite in `dir`.
        max_mbytes: of everything in `dir` together; further uploads are refused, and batches wait.
        max_caller_mbytes: the same for each caller.
        max_caller_batches: of one caller that have not ended.
        max_file_mbytes: of one upload.
        max_lines: of one batch.
        min_free_mbytes: room on the disk that is left to others.
        keep_days: files and ended batches are deleted after so long, unless their caller asked for less.
        deferred_hours: a deferred request that was not answered after so long is given up, and an answer that nobody
            fetched is forgotten.
        max_deferred: deferred requests kept at once, those that were answered included; nine tenths by one caller.
        webhook_url: where to tell of deferred requests that were answered and batches that ended, besides their being
            there to be fetched; empty: nowhere.
        webhook_secret: signs what is sent there (`whsec_…`); `env:NAME` is read from the environment.
        concurrency: lines that run at once at most; 0: as many as there are free slots.
        beside_slowdown: what lines may slow down answers of online requests that run beside them, as a share; lines
            that would cost more wait until there are none.
    """

    dir: str = ""
    database: str = ""
    max_mbytes: Megabytes = 10_000
    max_caller_mbytes: Megabytes = 2_000
    max_caller_batches: Count = 100
    max_file_mbytes: Megabytes = 200
    max_lines: Count = 50_000
    min_free_mbytes: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 500
    keep_days: Annotated[float, msgspec.Meta(gt=0, le=3_650)] = 30.0
    deferred_hours: Annotated[float, msgspec.Meta(gt=0, le=8_760)] = 24.0
    max_deferred: Count = 1_000
    webhook_url: str = ""
    webhook_secret: str = ""
    concurrency: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    beside_slowdown: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.05

    def __post_init__(self) -> None:
        """Check what the types cannot say; msgspec puts the key's path in front of a ValueError."""
        fault = url_fault(self.webhook_url) if self.webhook_url else ""
        if fault:
            raise ValueError(f"webhook_url: {fault}")
        if self.webhook_url and not self.webhook_secret:
            raise ValueError("webhook_url needs webhook_secret: what is sent there is signed")
        if self.database and not self.dir:
            raise ValueError("database needs dir too: without a folder for files there are no jobs")


def window_s(text: str) -> int:
    """Read a completion window, such as `24h`, in seconds.

    Raises:
        InvalidRequest: it is no number of seconds, minutes, hours or days, or more than 30 days.
    """
    found = _WINDOW.fullmatch(text)
    length_s = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < length_s <= _LONGEST_WINDOW_S:
        raise InvalidRequest(
            f"`completion_window`: `{text[:40]}`: expected a whole number and s, m, h or d, as in `24h` or `30m`, "
            "at most 30d",
            param="completion_window",
        )
    return length_s
