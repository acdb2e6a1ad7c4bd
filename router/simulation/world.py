"""The world of a simulation: devices, the rungs they serve, the links to them, and how uncertain all of it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from router.base.config import load

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Spread = Annotated[float, msgspec.Meta(ge=0, le=3)]
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


class RungSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[device.rung]]`: one variant on a device, the best first.

    Attributes:
        quality: what an answer of it is worth, relative to the family's reference.
        prefill_tokens_per_s: prompt tokens a second; a prefill has the device for itself.
        step_ms: one decode step of one sequence.
        batch_slope: relative growth of a step per further sequence: step(b) = step · (1 + slope · (b − 1)).
        context_tokens: window for prompt and answer together.
    """

    variant: Name
    quality: Share
    prefill_tokens_per_s: Positive
    step_ms: Positive
    batch_slope: NotNegative = 0.1
    context_tokens: Count = 4096

    def step_s(self, batch: int) -> float:
        """Return the seconds of one decode step of `batch` sequences."""
        return self.step_ms / 1e3 * (1.0 + self.batch_slope * (batch - 1))


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[device.link]`: the network to a remote device.

    Attributes:
        rtt_ms: round trip of the least packet.
        jitter: standard deviation of a request's log round trip.
        uplink_mbps: megabits a second towards the device, shared by all requests, first come, first served.
        metered: bytes on it cost money.
    """

    rtt_ms: NotNegative = 40.0
    jitter: Spread = 0.0
    uplink_mbps: Positive = 10.0
    metered: bool = False


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"rungs": "rung"}):
    """`[[device]]`: something that computes; its rungs share its slots and its time.

    Attributes:
        remote: reached over `link`, as an upstream tier.
        slots: sequences it runs at once, over all rungs; more wait inside, first come, first served.
        endpoint: what fails together; empty for `local`, or for a URL by its name.
    """

    name: Name
    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    rungs: Annotated[tuple[RungSpec, ...], msgspec.Meta(min_length=1)]
    remote: bool = False
    endpoint: str = ""
    link: LinkSpec = LinkSpec()

    @property
    def endpoint_key(self) -> str:
        return self.endpoint or (f"http://{self.name}" if self.remote else "local")


class NoiseSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[noise]`: what nobody can know.

    Attributes:
        sigma: of a request's log prefill time and of its log decode pace (two draws, median 1).
        prior_error_sigma: of the log error of each declared speed.
    """

    sigma: Spread = 0.3
    prior_error_sigma: Spread = 0.3


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"devices": "device"}):
    """A whole `WORLD.toml`.

    Attributes:
        family: the model that every request asks for.
        report_interval_ms: how often a remote device reports its load.
    """

    devices: Annotated[tuple[DeviceSpec, ...], msgspec.Meta(min_length=1)]
    family: Name = "model"
    report_interval_ms: Positive = 500.0
    noise: NoiseSpec = NoiseSpec()

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise ValueError(f"device names must be unique; found {', '.join(names)}")
        for device in self.devices:
            variants = [rung.variant for rung in device.rungs]
            if len(set(variants)) != len(variants):
                raise ValueError(f"device {device.name}: variants must be unique; found {', '.join(variants)}")


def load_world(path: Path) -> World:
    """Read a `WORLD.toml`.

    Raises:
        ConfigError: it cannot be read, or does not fit; the message names the key and the line.
    """
    return load(path, World)


def two_tiers() -> World:
    """Return the world of the shipped `two_tiers.toml`: an edge device and a cloud, two rungs each."""
    return load_world(Path(__file__).with_name("worlds") / "two_tiers.toml")
