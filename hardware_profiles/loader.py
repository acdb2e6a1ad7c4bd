"""One TOML per device class: what the board is, how to recognise it, how to run on it, how fast it is at first guess.

Classes that nobody knows are served by the generic ones, whose threads and memory are fitted to the device at hand.

Profiles are strict: an unknown key or a figure out of range is a `ConfigError` naming the file, the key and the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from router.base.config import load
from router.base.cuda import Gpu
from router.base.errors import ConfigError
from router.values.replica import SpeedPrior

BUILTIN_DIR = Path(__file__).resolve().parent

Count = Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)]
Bytes = Annotated[int, msgspec.Meta(gt=0, le=1 << 50)]
Speed = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Degrees = Annotated[float, msgspec.Meta(gt=0, le=1_000)]
ComputeCapability = Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+$")]
Name = Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[a-z0-9][a-z0-9.-]*$")]


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the machine says about itself; read by `hardware_profiles.facts`, faked by tests.

    Attributes:
        architecture: as `uname -m` says it, e.g. `x86_64`, `aarch64`.
        board: `/proc/device-tree/model` without its NUL, None where there is no device tree.
        compatible: the entries of `/proc/device-tree/compatible`, most specific first.
        memory_bytes: MemTotal of `/proc/meminfo` (a little less than what is soldered on).
        l4t: release of Linux for Tegra, e.g. `36.4.3`, None elsewhere.
        gpu: what CUDA's driver shows, None without one.
    """

    architecture: str
    memory_bytes: int
    cpu_count: int
    cpu_model: str = ""
    board: str | None = None
    compatible: tuple[str, ...] = ()
    l4t: str | None = None
    gpu: Gpu | None = None


class Fit(NamedTuple):
    """How well rules fit a device: the sum of what each rule says of it, and the rules in words."""

    weight: int
    reasons: tuple[str, ...]


class MatchRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every rule given must hold; the profile whose rules say most of a device wins.

    Attributes:
        board_contains: one of these appears in the board's name, whatever the case.
        compatible: one of these is an entry of the device tree's `compatible`; `*` stands for any text
            (`nvidia,p3767-0000`, `nvidia,tegra*`).
        cuda_compute_capability: the GPU's is one of these: `8.7`.
        architecture: one of these is the CPU architecture.
        memory_min_bytes, memory_max_bytes: bounds on MemTotal, which tells apart boards of one name.
    """

    board_contains: tuple[str, ...] = ()
    compatible: tuple[str, ...] = ()
    cuda_compute_capability: tuple[ComputeCapability, ...] = ()
    architecture: tuple[str, ...] = ()
    memory_min_bytes: Bytes | None = None
    memory_max_bytes: Bytes | None = None

    def fit(self, facts: DeviceFacts) -> Fit | None:
        """Return how well the rules fit, None when one does not hold."""
        weight, reasons = 0, []
        for is_asked, held in (
            (bool(self.board_contains), self._board(facts)),
            (bool(self.compatible), self._device_tree(facts)),
            (bool(self.cuda_compute_capability), self._gpu(facts)),
            (bool(self.architecture), self._cpu(facts)),
            (self.memory_min_bytes is not None or self.memory_max_bytes is not None, self._memory(facts)),
        ):
            if is_asked and held is None:
                return None
            if is_asked and held is not None:
                weight += held[0]
                reasons.append(held[1])
        return Fit(weight, tuple(reasons))

    def _board(self, facts: DeviceFacts) -> tuple[int, str] | None:
        board = facts.board or ""
        named = next((part for part in self.board_contains if part.lower() in board.lower()), None)
        return None if named is None else (4, f"board `{board}` contains `{named}`")

    def _device_tree(self, facts: DeviceFacts) -> tuple[int, str] | None:
        for pattern in self.compatible:
            for entry in facts.compatible:
                if fnmatchcase(entry, pattern):
                    return (2 if "*" in pattern else 4), f"device tree is compatible with `{entry}`"
        return None

    def _gpu(self, facts: DeviceFacts) -> tuple[int, str] | None:
        if facts.gpu is None:
            return None
        found = ".".join(map(str, facts.gpu.compute_capability))
        if found not in self.cuda_compute_capability:
            return None
        return 2, f"GPU `{facts.gpu.name}` has compute capability {found}"

    def _cpu(self, facts: DeviceFacts) -> tuple[int, str] | None:
        return (1, f"architecture is {facts.architecture}") if facts.architecture in self.architecture else None

    def _memory(self, facts: DeviceFacts) -> tuple[int, str] | None:
        low, high = self.memory_min_bytes or 0, self.memory_max_bytes
        if facts.memory_bytes < low or (high is not None and facts.memory_bytes > high):
            return None
        return 1, f"{facts.memory_bytes / 2**30:.1f} GiB of memory is in range"


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of the board's data sheet; None where the class does not fix one.

    Attributes:
        int8_dense_tops: dense INT8 tera-operations a second of the GPU (sparse figures are twice that: not for plans).
        cuda_compute_capability: `8.7` for Orin.
    """

    memory_bytes: Bytes | None = None
    memory_bytes_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | None = None
    int8_dense_tops: Speed | None = None
    cpu_cores: Count | None = None
    cuda_compute_capability: ComputeCapability | None = None


class PowerMode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An nvpmodel mode. Matched by name: id 0 is not "the most" on every board.

    Attributes:
        speed: throughput relative to the mode the priors were taken in.
    """

    name: str
    id: Annotated[int, msgspec.Meta(ge=0, le=1_000)]
    speed: Annotated[float, msgspec.Meta(gt=0, le=2)] = 1.0
    watts: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None


class Thermal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Temperatures in °C: within `shed_margin_c` of `passive_c` the agent offers itself for less work, until it is
    `resume_margin_c` below.

    Attributes:
        passive_c: where the kernel starts to throttle, unless a trip point read from sysfs says otherwise.
        critical_c: where it powers off.
        gpu_load_path: sysfs file with the GPU load in tenths of a percent.
    """

    passive_c: Degrees
    critical_c: Degrees
    shed_margin_c: Degrees = 10.0
    resume_margin_c: Degrees = 15.0
    gpu_load_path: str | None = None

    def __post_init__(self) -> None:
        if self.critical_c <= self.passive_c:
            raise ValueError(f"critical_c {self.critical_c} must be above passive_c {self.passive_c}")
        if self.resume_margin_c <= self.shed_margin_c:
            raise ValueError("resume_margin_c must be above shed_margin_c, else the device would flap")


class Power(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the board's draw is measured.

    Attributes:
        input_rails: labels of the power monitors' rails whose sum it is; empty, or with one of them missing, takes the
            first set of those known from Jetsons that this board has.
    """

    input_rails: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()


class TensorRtOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the engines that are built for this device class; what is served must not exceed them."""

    workspace_bytes: Bytes = 1 << 30
    max_batch: Count = 4
    max_sequence_tokens: Count = 256
    max_past_tokens: Count = 2048


class RuntimeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How models run on this device.

    Attributes:
        name: a runtime of `edge_agent.runtime.registry`.
        providers: ways to run, best first; the ones not present are a visible fallback. `cuda` and `cpu` are those of
            ONNX Runtime, `tensorrt` is an engine that `overspill models build` has built before.
        intra_op_threads: threads of one operator; 0 is one for each CPU this process may use.
        spin_us: how long a worker thread waits for the next operator before it sleeps; 0 sleeps at once, which is
            better where other busy processes share the cores.
    """

    name: Literal["onnx", "tensorrt"] = "onnx"
    providers: tuple[Literal["tensorrt", "cuda", "cpu"], ...] = ("cpu",)
    intra_op_threads: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    spin_us: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 20
    tensorrt: TensorRtOptions = TensorRtOptions()


class Serving(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is served at once.

    Attributes:
        kv_slots: sequences decoded together.
        context_tokens: window for prompt and answer; the KV memory bound is slots · window.
        prefill_chunk_tokens: prompt tokens computed in one step while others wait for their next token.
        decode_steps_per_chunk: decode steps of the others between two chunks.
        queue_limit: requests that may wait inside one replica.
    """

    kv_slots: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    context_tokens: Annotated[int, msgspec.Meta(ge=64, le=2**31 - 1)] = 2048
    prefill_chunk_tokens: Annotated[int, msgspec.Meta(ge=16, le=4096)] = 128
    decode_steps_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    queue_limit: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16


class Prior(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed of a model of about `parameters` at one precision, before anything was observed here."""

    parameters: Annotated[int, msgspec.Meta(gt=0, le=10**15)]
    precision: Literal["fp32", "fp16", "int8", "int4"]
    prefill_tokens_per_s: Speed
    decode_tokens_per_s: Speed
    source: Annotated[str, msgspec.Meta(min_length=10)]
    decode_batch_slope: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device class.

    Attributes:
        match_any: further sets of rules; the class fits a device when any set holds.
        generic: the class says little of a device, so threads and memory are fitted to the one at hand.
    """

    name: Name
    title: str
    match: MatchRules
    hardware: Hardware
    thermal: Thermal
    runtime: RuntimeOptions
    serving: Serving
    priors: Annotated[tuple[Prior, ...], msgspec.Meta(min_length=1)]
    power_modes: tuple[PowerMode, ...] = ()
    power: Power = Power()
    match_any: tuple[MatchRules, ...] = ()
    generic: bool = False

    def fit(self, facts: DeviceFacts) -> Fit | None:
        """Return how well the best set of rules fits, None when none holds."""
        found = (rules.fit(facts) for rules in (self.match, *self.match_any))
        return max((fit for fit in found if fit is not None), key=lambda fit: fit.weight, default=None)

    def fitted(self, facts: DeviceFacts) -> Profile:
        """Return the profile with threads, slots, window and workspace cut to this device, if it is a generic one."""
        if not self.generic:
            return self
        cores, memory_bytes = max(1, facts.cpu_count), facts.memory_bytes
        spare = 2 if cores >= _MANY_CORES else 1  # for the gateway, and for the application beside the agent
        tensorrt = self.runtime.tensorrt
        workspace_bytes = min(tensorrt.workspace_bytes, max(_LEAST_WORKSPACE_BYTES, memory_bytes // 16))
        runtime = msgspec.structs.replace(
            self.runtime,
            intra_op_threads=max(1, cores - spare),
            tensorrt=msgspec.structs.replace(tensorrt, workspace_bytes=workspace_bytes),
        )
        slots, context_tokens = next(
            ((slots, tokens) for limit_bytes, slots, tokens in _SMALL_MEMORY if memory_bytes < limit_bytes),
            (self.serving.kv_slots, self.serving.context_tokens),
        )
        serving = msgspec.structs.replace(
            self.serving,
            kv_slots=min(slots, self.serving.kv_slots),
            context_tokens=min(context_tokens, self.serving.context_tokens),
        )
        return msgspec.structs.replace(self, runtime=runtime, serving=serving)

    def prior(self, parameters: int, precision: str) -> SpeedPrior:
        """Return the first guess for a model of `parameters`, scaled from the nearest size of that precision.

        Decode is bound by the bytes of the weights and prefill by operations, so both go with 1/parameters. Without
        a figure of that precision the nearest size of any precision is scaled by bytes a weight as well.
        """
        same = [prior for prior in self.priors if prior.precision == precision] or list(self.priors)
        nearest = min(same, key=lambda prior: max(prior.parameters / parameters, parameters / prior.parameters))
        scale = nearest.parameters / parameters * (_BYTES[nearest.precision] / _BYTES.get(precision, 4.0))
        exact = abs(scale - 1) < 0.02
        return SpeedPrior(
            prefill_tokens_per_s=nearest.prefill_tokens_per_s * scale,
            decode_tokens_per_s=nearest.decode_tokens_per_s * scale,
            decode_batch_slope=nearest.decode_batch_slope,
            source=f"profile {self.name}: {nearest.source}" + ("" if exact else f"; scaled ×{scale:.2f} by size"),
        )


_MANY_CORES = 6
_LEAST_WORKSPACE_BYTES = 128 << 20
_SMALL_MEMORY = ((2 << 30, 1, 1024), (4 << 30, 2, 2048))  # below so many bytes: KV slots, tokens of the window
_BYTES = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class ProfileMatch:
    """The profile of a device and, in words, why it is this one."""

    profile: Profile
    reason: str


def load_profiles(extra_dir: Path | None = None) -> dict[str, Profile]:
    """Return every profile by name: the built-in ones, and those of `extra_dir` over them.

    Raises:
        ConfigError: a file is not a valid profile, or its name is not the file's name.
    """
    profiles: dict[str, Profile] = {}
    if extra_dir is not None and not extra_dir.is_dir():
        raise ConfigError(f"profile directory {extra_dir} does not exist; create it or drop the setting")
    for directory in [BUILTIN_DIR, *([extra_dir] if extra_dir else [])]:
        for path in sorted(directory.glob("*.toml")):
            profile = load(path, Profile)
            if profile.name != path.stem:
                raise ConfigError(f"{path}: name `{profile.name}` must equal the file name `{path.stem}`")
            profiles[profile.name] = profile
    return profiles


def match_profile(facts: DeviceFacts, profiles: Sequence[Profile] | None = None) -> ProfileMatch:
    """Return the profile whose rules fit best, fitted to the device if it is generic.

    A built-in one fits anything, so an unknown board is served too.

    Raises:
        ConfigError: none of `profiles` fits; names the device and the setting that chooses one by hand.
    """
    candidates = list(load_profiles().values()) if profiles is None else list(profiles)
    found = [(fit, profile) for profile in candidates if (fit := profile.fit(facts)) is not None]
    if not found:
        known = ", ".join(sorted(profile.name for profile in candidates))
        raise ConfigError(
            f"no hardware profile fits board `{facts.board}`, {facts.architecture}, "
            f"{facts.memory_bytes / 2**30:.1f} GiB; set agent.profile to one of: {known}, or add your own TOML "
            "to agent.profiles_dir",
            param="agent.profile",
        )
    fit, profile = max(found, key=lambda item: (item[0].weight, item[1].name))
    return ProfileMatch(profile.fitted(facts), "; ".join(fit.reasons) or "no other profile fits this device")


def choose_profile(name: str, facts: DeviceFacts, extra_dir: Path | None = None) -> ProfileMatch:
    """Return the profile called `name`, or the matching one for `auto`.

    Raises:
        ConfigError: unknown name, or nothing fits.
    """
    profiles = load_profiles(extra_dir)
    if name == "auto":
        return match_profile(facts, list(profiles.values()))
    if name not in profiles:
        raise ConfigError(
            f"agent.profile: unknown profile `{name}`; known: auto, {', '.join(sorted(profiles))}",
            param="agent.profile",
        )
    return ProfileMatch(profiles[name].fitted(facts), "chosen by agent.profile")
