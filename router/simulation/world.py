"""The world of a simulation: devices, the rungs they serve, the links to them, and how uncertain all of it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from router.base.config import load
from router.base.errors import ConfigError
from router.values.settings import RouterSettings

SHIPPED = Path(__file__).with_name("worlds")
"""Worlds that come with Overspill."""

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Spread = Annotated[float, msgspec.Meta(ge=0, le=3)]
DEFAULT_UPLINK_MBPS = 10.0
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)]


class RungSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[device.rung]]`: one variant on a device, the best first.

    Attributes:
        quality: what an answer of it is worth, relative to the family's reference.
        prefill_tokens_per_s: prompt tokens a second; a prefill has the device for itself.
        prefill_fixed_ms: what each prefill takes besides its tokens: accepting, tokenizing, the step before it.
        step_ms: one decode step of one sequence.
        batch_slope: relative growth of a step per further sequence: step(b) = step · (1 + slope · (b − 1)).
        context_tokens: window for prompt and answer together.
        family: what it is a variant of; empty for the family of the world.
    """

    variant: Name
    quality: Share
    prefill_tokens_per_s: Positive
    step_ms: Positive
    prefill_fixed_ms: NotNegative = 0.0
    batch_slope: NotNegative = 0.1
    context_tokens: Count = 4096
    family: str = ""

    def prefill_s(self, prompt_tokens: float) -> float:
        """Return the seconds of one prefill."""
        return self.prefill_fixed_ms / 1e3 + prompt_tokens / self.prefill_tokens_per_s

    def step_s(self, batch: int) -> float:
        """Return the seconds of one decode step of `batch` sequences."""
        return self.step_ms / 1e3 * (1.0 + self.batch_slope * (batch - 1))


class LinkSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[device.link]`: the network to a remote device.

    Attributes:
        rtt_ms: round trip of the least packet.
        jitter: standard deviation of a request's log round trip.
        uplink_mbps: megabits a second towards the device, shared by all requests, first come, first served; 10 where
            neither it nor a trace is set.
        trace: a file of the uplink's rate over time instead, from the world's own folder; begins anew at its end. A
            packet trace of mahimahi, or CSV with `t_s` and a column of rates.
        trace_name, trace_column: which trace of a CSV that holds several, and which column.
    """

    rtt_ms: NotNegative = 40.0
    jitter: Spread = 0.0
    uplink_mbps: Positive | None = None
    trace: str = ""
    trace_name: str = ""
    trace_column: str = "mbps"

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        if self.trace and self.uplink_mbps is not None:
            raise ValueError("set either uplink_mbps or trace: both tell the uplink's rate")


class DeviceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"rungs": "rung"}):
    """`[[device]]`: something that computes; its rungs share its slots and its time.

    Attributes:
        remote: reached over `link`, as an upstream tier.
        slots: sequences it runs at once, over all rungs; more wait inside, first come, first served.
        endpoint: what fails together; empty for `local`, or for a URL by its name.
        prefill_share: speed of a prefill while others decode, of its speed alone.
        decode_share: speed of decode meanwhile. Chunked prefill, and steps that hold both, have it above 0.
        machine: devices that name the same one slow each other down: cores, memory or power that they share.
        beside: its speed while another device of its machine computes, of its full speed.
        kv_tokens: room of each rung's KV cache; what its sequences leave of it keeps prompts, the longest unused
            forgotten first, and it tells what it found. None keeps nothing and tells nothing.
    """

    name: Name
    slots: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    rungs: Annotated[tuple[RungSpec, ...], msgspec.Meta(min_length=1)]
    remote: bool = False
    endpoint: str = ""
    link: LinkSpec = LinkSpec()
    prefill_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    decode_share: Share = 0.0
    machine: str = ""
    beside: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    kv_tokens: Count | None = None

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


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every fault tells."""

    device: Name
    from_s: NotNegative
    to_s: Positive


class Cut(Fault, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[faults.cut]]`: nothing passes the link to a remote device."""


class SlowLink(Fault, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[faults.slow_link]]`: the link to a remote device is worse than it was.

    Attributes:
        uplink_factor: on the uplink's rate.
        rtt_factor: on round trips.
    """

    uplink_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    rtt_factor: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.0


class DeadReplica(Fault, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[faults.dead_replica]]`: rungs that serve nobody; what ran there breaks.

    Attributes:
        variant: one rung; empty for all of the device.
    """

    variant: str = ""


class PowerMode(Fault, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[faults.power_mode]]`: a device computes slower: a power mode, heat, another process.

    Attributes:
        speed: of its full speed; 0 stands still.
    """

    speed: Share


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[faults]`: what goes wrong, and when; seconds after the begin."""

    cut: tuple[Cut, ...] = ()
    slow_link: tuple[SlowLink, ...] = ()
    dead_replica: tuple[DeadReplica, ...] = ()
    power_mode: tuple[PowerMode, ...] = ()

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        _check_times(self.cut)
        _check_times(self.slow_link)
        _check_times(self.dead_replica)
        _check_times(self.power_mode)

    def all(self) -> tuple[Fault, ...]:
        return (*self.cut, *self.slow_link, *self.dead_replica, *self.power_mode)


def _check_times(faults: Sequence[Fault]) -> None:
    """Refuse faults of one kind that end before they begin, or overlap."""
    ends_s: dict[tuple[str, str], float] = {}
    for fault in sorted(faults, key=lambda fault: fault.from_s):
        if fault.to_s <= fault.from_s:
            raise ValueError(f"device {fault.device}: to_s = {fault.to_s:g} is not after from_s = {fault.from_s:g}")
        what = (fault.device, fault.variant if isinstance(fault, DeadReplica) else "")
        if fault.from_s < ends_s.get(what, 0.0):
            raise ValueError(f"device {fault.device}: two faults of one kind overlap at {fault.from_s:g} s")
        ends_s[what] = fault.to_s


class World(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"devices": "device"}):
    """A whole `WORLD.toml`.

    Attributes:
        family: the model that every request asks for.
        report_interval_ms: how often a remote device reports its load, and is probed.
        router: the `[router]` table of the tier that decides; a simulation may name another policy.
    """

    devices: Annotated[tuple[DeviceSpec, ...], msgspec.Meta(min_length=1)]
    family: Name = "model"
    report_interval_ms: Positive = 500.0
    noise: NoiseSpec = NoiseSpec()
    faults: Faults = Faults()
    router: RouterSettings = RouterSettings()

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise ValueError(f"device names must be unique; found {', '.join(names)}")
        for device in self.devices:
            variants = [rung.variant for rung in device.rungs]
            if len(set(variants)) != len(variants):
                raise ValueError(f"device {device.name}: variants must be unique; found {', '.join(variants)}")
        self._check_faults()

    def _check_faults(self) -> None:
        devices = {device.name: device for device in self.devices}
        for fault in self.faults.all():
            device = devices.get(fault.device)
            if device is None:
                raise ValueError(f"faults: there is no device {fault.device!r}; there are {', '.join(devices)}")
            if isinstance(fault, Cut | SlowLink) and not device.remote:
                raise ValueError(f"faults: device {fault.device!r} is not remote, so there is no link to it")
            variants = [rung.variant for rung in device.rungs]
            if isinstance(fault, DeadReplica) and fault.variant and fault.variant not in variants:
                raise ValueError(
                    f"faults: device {fault.device!r} has no rung {fault.variant!r}; it has {', '.join(variants)}"
                )


def load_world(path: Path) -> World:
    """Read a `WORLD.toml`; network traces are looked for from its folder.

    Raises:
        ConfigError: it cannot be read, or does not fit; the message names the key and the line.
    """
    world = load(path, World)
    replace = msgspec.structs.replace
    devices = tuple(
        replace(device, link=replace(device.link, trace=str(path.parent / device.link.trace)))
        if device.link.trace
        else device
        for device in world.devices
    )
    return replace(world, devices=devices)


def find_world(name_or_path: str) -> World:
    """Return a world by the path of its file, or by the name of one that comes with Overspill.

    Raises:
        ConfigError: there is no such file or name, or it does not fit.
    """
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}
    path = Path(name_or_path)
    if not path.is_file() and name_or_path not in shipped:
        raise ConfigError(f"world: {name_or_path!r} is neither a file nor one of {', '.join(shipped)}", param="world")
    return load_world(path if path.is_file() else shipped[name_or_path])


def two_tiers() -> World:
    """Return the world of the shipped `two_tiers.toml`: an edge device and a cloud, two rungs each."""
    return load_world(SHIPPED / "two_tiers.toml")
