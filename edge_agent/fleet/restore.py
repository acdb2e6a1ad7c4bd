"""What of the stored overrides can be in force again after a restart: all of it, or each part that can, on its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from router.base.errors import ConfigError
from router.fleetwire.overrides import lay_over, leaves

Attempt = Callable[[Mapping[str, Any]], Awaitable[ConfigError | None]]
"""Puts overrides into force as a whole; None if they are now, else why not, and nothing changed."""


@dataclass(slots=True)
class Restored:
    """What is in force of the stored overrides, and why the rest is not, by key."""

    overrides: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, ConfigError] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        return "; ".join(f"{key}: {error.message}" for key, error in self.failed.items())


async def restore_each(overrides: Mapping[str, Any], attempt: Attempt, skip: Mapping[str, ConfigError]) -> Restored:
    """Put each override into force that can be, beside those that are already; the policy is the first.

    Tables of `skip` are left out for the error given. A key may need another one (a preload its variant), so those that
    failed are tried again as long as another one succeeded.
    """
    restored = Restored()
    waiting: list[tuple[str, dict[str, Any]]] = []
    for key, piece in _pieces(overrides):
        error = skip.get(key.partition(".")[0])
        if error is not None:
            restored.failed[key] = error
        else:
            waiting.append((key, piece))
    progress = True
    while waiting and progress:
        progress, again = False, []
        for key, piece in waiting:
            wanted = lay_over(restored.overrides, piece)
            error = await attempt(wanted)
            if error is None:
                restored.overrides, progress = wanted, True
                restored.failed.pop(key, None)
            else:
                restored.failed[key] = error
                again.append((key, piece))
        waiting = again
    return restored


def _pieces(overrides: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every override as a tree of its own: the policy first, the router before the models."""
    found = [(key, value) for key, value in leaves(overrides) if value is not None]
    for key, value in sorted(found, key=lambda item: (item[0] != "router.policy", not item[0].startswith("router."))):
        piece: Any = value
        for part in reversed(key.split(".")):
            piece = {part: piece}
        yield key, piece
