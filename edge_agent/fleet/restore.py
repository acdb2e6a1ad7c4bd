"""What of the stored overrides can be in force again after a restart: all of it, or each part that can, on its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
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
    """Put each override into force that can be, beside those that are already: the policy, the router, the models.

    A table is tried as a whole, for its keys may need each other (a preload its variant), and key by key if that
    fails, again and again as long as one more succeeds. Tables of `skip` are left out for the error given.
    """
    restored = Restored()
    policy = {key: value for key, value in _keys(overrides, "router").items() if key == "router.policy"}
    router = {key: value for key, value in _keys(overrides, "router").items() if key != "router.policy"}
    for keys in (policy, router, _keys(overrides, "models")):
        error = next((skip[key.split(".")[0]] for key in keys if key.split(".")[0] in skip), None)
        if error is not None:
            restored.failed.update(dict.fromkeys(keys, error))
        elif keys:
            await _restore_table(restored, keys, attempt)
    return restored


async def _restore_table(restored: Restored, keys: Mapping[str, Any], attempt: Attempt) -> None:
    whole = restored.overrides
    for key, value in keys.items():
        whole = lay_over(whole, _tree(key, value))
    error = await attempt(whole)
    if error is None:
        restored.overrides = whole
        return
    if len(keys) == 1:
        restored.failed.update(dict.fromkeys(keys, error))
        return
    waiting, progress = dict(keys), True
    while waiting and progress:
        progress = False
        for key, value in list(waiting.items()):
            wanted = lay_over(restored.overrides, _tree(key, value))
            error = await attempt(wanted)
            if error is None:
                restored.overrides, progress = wanted, True
                del waiting[key]
                restored.failed.pop(key, None)
            else:
                restored.failed[key] = error


def _keys(overrides: Mapping[str, Any], table: str) -> dict[str, Any]:
    """Return the overrides of a table by dotted key; null is none."""
    return {key: value for key, value in leaves({table: overrides.get(table, {})}) if value is not None}


def _tree(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    tree: dict[str, Any] = value
    return tree
