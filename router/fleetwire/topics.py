"""Topics of the fleet: one device's address, and the names that may stand in `overspill/v1/{fleet}/{device}/{leaf}`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from router.base.errors import ConfigError

PREFIX = "overspill/v1"

Leaf = Literal["desired", "reported", "status", "telemetry", "command", "response"]
LEAVES: tuple[Leaf, ...] = ("desired", "reported", "status", "telemetry", "command", "response")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def check_name(name: str, what: str) -> str:
    """Return `name` if it may be one level of a topic.

    Raises:
        ConfigError: it holds anything but letters, digits, `_`, `.` and `-` (so no `+`, `#`, `/`), or is too long.
    """
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"{what} {name!r} is no valid name; use 1 to 64 letters, digits, `_`, `.`, `-`, not beginning with a mark",
            param=what,
        )
    return name


@dataclass(frozen=True, slots=True)
class Address:
    """One device of one fleet, and its topics.

    Raises:
        ConfigError: a name is not valid.
    """

    fleet: str
    device: str

    def __post_init__(self) -> None:
        check_name(self.fleet, "fleet")
        check_name(self.device, "device")

    def __str__(self) -> str:
        return f"{self.fleet}/{self.device}"

    def topic(self, leaf: Leaf) -> str:
        return f"{PREFIX}/{self.fleet}/{self.device}/{leaf}"


def topic_filter(fleet: str, leaf: Leaf) -> str:
    """Return the subscription filter for one leaf of every device of a fleet."""
    return f"{PREFIX}/{check_name(fleet, 'fleet')}/+/{leaf}"


def parse_topic(topic: str) -> tuple[Address, Leaf] | None:
    """Take a topic apart; None if it is not one of ours."""
    parts = topic.split("/")
    if len(parts) != 5 or "/".join(parts[:2]) != PREFIX:
        return None
    leaf = next((leaf for leaf in LEAVES if leaf == parts[4]), None)
    if leaf is None or not _NAME.fullmatch(parts[2]) or not _NAME.fullmatch(parts[3]):
        return None
    return Address(parts[2], parts[3]), leaf
