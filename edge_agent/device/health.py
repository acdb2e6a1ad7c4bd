"""How am I: memory, GPU load, heat, power and throttling, from /proc and sysfs alone (below any root)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hardware_profiles.facts import memory_figures, read_number, read_text
from hardware_profiles.loader import PowerMode, Profile, Thermal

_PLAUSIBLE_C = (1.0, 130.0)
_PLAUSIBLE_TRIP_C = (60.0, 125.0)
_LOW_MEMORY_SHARE = 0.04
# PMIC-Die reads 100 °C for ever (TX2, Xavier); the estimate for the fan is a mean of other zones.
_CONSTANT_ZONES = frozenset({"PMIC-Die", "thermal-fan-est"})
# Sets of rails that make up what a board draws, most exact first: its supply where that is measured, else the inputs
# of its regulators. AGX Orin's VDDQ_VDD2_1V8AO is fed by VIN_SYS_5V0 and not counted twice.
_INPUT_RAILS = (
    ("VDD_IN",),  # Orin Nano, Orin NX, Xavier NX
    ("VIN",),  # AGX Thor
    ("POM_5V_IN",),  # Nano
    ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"),  # AGX Orin
    ("VDD_GPU", "VDD_CPU_SOC_MSS", "VIN_SYS_5V0"),  # Thor without its input monitor
    ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),  # AGX Xavier
)
_SINGLE_RAIL_CHIPS = frozenset({"ina238"})
_MODE_LINE = re.compile(r"<\s*POWER_MODEL\s+ID=(?P<id>\d+)\s+NAME=(?P<name>\S+)")


@dataclass(frozen=True, slots=True)
class ZoneHeat:
    """A thermal zone, its temperature, and where the kernel or the firmware slows this device down because of it."""

    zone: str
    temperature_c: float
    throttles_at_c: float

    @property
    def margin_c(self) -> float:
        """How far it is from that."""
        return self.throttles_at_c - self.temperature_c


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """One look at the device; None where the machine does not tell.

    Attributes:
        temperatures_c: by thermal zone; zones that are off are missing.
        nearest: the zone that is nearest to throttling, which need not be the hottest.
        hot: some zone is within `shed_margin_c` of throttling; stays set until all are `resume_margin_c` away.
        gpu_load: share in [0, 1].
        power_mode: nvpmodel's name for it.
        power_w: the whole board's draw, the sum of `power_rails`.
        throttle_events: over-current and thermal throttling since the last reading.
    """

    memory_total_bytes: int
    memory_available_bytes: int
    temperatures_c: dict[str, float]
    hottest_c: float | None
    nearest: ZoneHeat | None
    hot: bool
    gpu_load: float | None
    power_mode: str | None
    power_w: float | None
    power_rails: tuple[str, ...]
    throttle_events: int

    @property
    def why_not(self) -> str:
        """Why this device should be given less to do, empty if nothing speaks against it."""
        if self.hot and self.nearest is not None:
            heat = self.nearest
            return f"hot: {heat.zone} at {heat.temperature_c:.0f} °C, throttles at {heat.throttles_at_c:.0f}"
        if 0 < self.memory_available_bytes < self.memory_total_bytes * _LOW_MEMORY_SHARE:
            return f"short of memory: {self.memory_available_bytes / 2**20:.0f} MiB are free"
        return ""


class HealthReader:
    """Reads the health of a device; keeps what is needed to tell changes and to avoid flapping."""

    def __init__(self, profile: Profile, root: Path = Path("/")) -> None:
        self._root = root
        self._thermal = profile.thermal
        self._modes = profile.power_modes
        self._zones = list(_zones(root, profile.thermal))
        own_rails = profile.power.input_rails
        self._input_rails = (*((own_rails,) if own_rails else ()), *_INPUT_RAILS)
        self._hwmons = {path: read_text(path / "name") for path in sorted((root / "sys/class/hwmon").glob("hwmon*"))}
        self._hot = False
        self._events = self._throttle_count()

    def read(self) -> DeviceHealth:
        """Read the sensors; a few dozen small reads, about a millisecond."""
        memory = memory_figures(self._root)
        heat = list(self._heat())
        nearest = min(heat, key=lambda zone: zone.margin_c, default=None)
        self._hot = self._is_hot(nearest)
        rails, power_w = self._power()
        events = self._throttle_count()
        fresh, self._events = max(0, events - self._events), events
        return DeviceHealth(
            memory_total_bytes=memory.get("MemTotal", 0),
            memory_available_bytes=memory.get("MemAvailable", 0),
            temperatures_c={zone.zone: zone.temperature_c for zone in heat},
            hottest_c=max((zone.temperature_c for zone in heat), default=None),
            nearest=nearest,
            hot=self._hot,
            gpu_load=self._gpu_load(),
            power_mode=read_power_mode(self._root, self._modes),
            power_w=power_w,
            power_rails=rails,
            throttle_events=fresh,
        )

    def _is_hot(self, nearest: ZoneHeat | None) -> bool:
        if nearest is None:
            return False
        margin_c = self._thermal.resume_margin_c if self._hot else self._thermal.shed_margin_c
        return nearest.margin_c <= margin_c

    def _heat(self) -> Iterator[ZoneHeat]:
        """The zones that are on; the others fail to read."""
        for path, name, throttles_at_c in self._zones:
            millidegrees = read_number(path / "temp")
            if millidegrees is not None and _PLAUSIBLE_C[0] <= millidegrees / 1000 <= _PLAUSIBLE_C[1]:
                yield ZoneHeat(name, millidegrees / 1000, throttles_at_c)

    def _gpu_load(self) -> float | None:
        if self._thermal.gpu_load_path is None:
            return None
        tenths_of_percent = read_number(self._root / self._thermal.gpu_load_path)
        return None if tenths_of_percent is None else min(1.0, tenths_of_percent / 1000)

    def _power(self) -> tuple[tuple[str, ...], float | None]:
        """The first set of input rails that this board has, and their sum in watts.

        Rails lie behind one another, so neither the largest nor the sum of all is the board's draw: without a set
        that is known to be complete there is no figure.
        """
        rails = dict(self._rails())
        for names in self._input_rails:
            if all(name in rails for name in names):
                return names, sum(rails[name] for name in names)
        return (), None

    def _rails(self) -> Iterator[tuple[str, float]]:
        """Every rail that is measured, by label, in watts."""
        for path, chip in self._hwmons.items():
            if chip in _SINGLE_RAIL_CHIPS:
                label = read_text(path / "in1_label") or read_text(path / "label") or "VIN"
                microwatts = read_number(path / "power1_input")
                if microwatts is not None:
                    yield label, microwatts / 1e6
            elif chip == "ina3221":
                for channel in (1, 2, 3):
                    millivolts = read_number(path / f"in{channel}_input")
                    milliamperes = read_number(path / f"curr{channel}_input")
                    if millivolts is not None and milliamperes is not None:
                        yield read_text(path / f"in{channel}_label"), millivolts * milliamperes / 1e6

    def _throttle_count(self) -> int:
        counters = [
            counter
            for path, name in self._hwmons.items()
            if name == "soctherm_oc"
            for counter in path.glob("oc*_event_cnt")
        ]
        counters += (self._root / "sys/devices/system/cpu").glob("cpu*/thermal_throttle/core_throttle_count")
        return sum(read_number(counter) or 0 for counter in counters)


def _zones(root: Path, thermal: Thermal) -> Iterator[tuple[Path, str, float]]:
    """Every thermal zone: where it lies, its name (made unique), and at which temperature it throttles."""
    seen: dict[str, int] = {}
    for path in sorted((root / "sys/class/thermal").glob("thermal_zone*"), key=_number_of):
        kind = read_text(path / "type") or path.name
        if kind in _CONSTANT_ZONES:
            continue
        seen[kind] = seen.get(kind, 0) + 1
        yield path, kind if seen[kind] == 1 else f"{kind}#{seen[kind]}", _throttles_at_c(path, thermal)


def _throttles_at_c(zone: Path, thermal: Thermal) -> float:
    """Where a zone throttles: at its lowest passive trip point, else at its lowest hot one.

    `active` ones start fans. Where the kernel only knows when to power off, the firmware slows down before that: at
    what the profile says.
    """
    trips: dict[str, list[float]] = {}
    for kind in zone.glob("trip_point_*_type"):
        millidegrees = read_number(kind.with_name(kind.name.replace("_type", "_temp")))
        if millidegrees is not None and _PLAUSIBLE_TRIP_C[0] <= millidegrees / 1000 <= _PLAUSIBLE_TRIP_C[1]:
            trips.setdefault(read_text(kind), []).append(millidegrees / 1000)
    for kind_of_trip in ("passive", "hot"):
        if kind_of_trip in trips:
            return min(trips[kind_of_trip])
    return min([thermal.passive_c, *trips.get("critical", [])])


def _number_of(path: Path) -> int:
    digits = re.search(r"\d+$", path.name)
    return int(digits[0]) if digits else 0


def read_power_mode(root: Path, modes: tuple[PowerMode, ...]) -> str | None:
    """Return the name of the nvpmodel mode in force, None where there is no nvpmodel.

    The board's own table counts; the profile's is asked only where that cannot be read, for ids differ by board.
    """
    status = re.search(r"\d+", read_text(root / "var/lib/nvpmodel/status"))
    if status is None:
        return None
    number = int(status[0])
    for found in _MODE_LINE.finditer(read_text(root / "etc/nvpmodel.conf")):
        if int(found["id"]) == number:
            return found["name"]
    return next((mode.name for mode in modes if mode.id == number), None)
