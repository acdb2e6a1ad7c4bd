"""One request of a job as it is put to the tier, and what came back. The gateway puts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Call:
    """A request.

    Attributes:
        owner: whose it is: what it costs is theirs.
        path: of the API, e.g. `/v1/chat/completions`.
        headers: lower-case names of ours that hold for it.
        in_slack: it runs when nobody else is served, and is no reason for anything; otherwise it is one of many.
    """

    request_id: str
    owner: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    in_slack: bool = True


@dataclass(frozen=True, slots=True)
class Told:
    """A whole reply.

    Attributes:
        retry_after_s: of a refusal: when to come back; None where that cannot help, and where it is none.
        headers: of ours.
    """

    status: int
    body: bytes
    retry_after_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Ask(Protocol):
    """Puts one request to the tier; cancelling it cancels its work."""

    async def __call__(self, call: Call) -> Told:
        """Return the reply. Never raises an `OverspillError`: errors are replies."""
        ...
