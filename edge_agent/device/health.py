"""How am I: memory, GPU load, heat, power and throttling, from /proc and sysfs alone (below any root)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hardware_profiles.facts import memory_figures, read_number, read_text
from hardware_profiles.loader import PowerMode, Profile

_PLAUSIBLE_C = (1.0, 130.0)
_PLAUSIBLE_TRIP_C = (60.0, 125.0)
_LOW_MEMORY_SHARE = 0.04
_MODE_LINE = re.compile(r"<\s*POWER_MODEL\s+ID=(?P<id>\d+)\s+NAME=(?P<name>\S+)")


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """One look at the device; None where the machine does not tell.

    Attributes:
        temperatures_c: by thermal zone; zones that are off are missing.
        passive_c: where the kernel starts to throttle.
        hot: at most `shed_margin_c` below that; stays set until it is `resume_margin_c` below.
        gpu_load: share in [0, 1].
        power_mode: nvpmodel's name for it.
        power_w: the whole board's draw.
        throttle_events: over-current and thermal throttling since the last look.
    """

    memory_total_bytes: int
    memory_available_bytes: int
    temperatures_c: dict[str, float]
    hottest_c: float | None
    passive_c: float
    hot: bool
    gpu_load: float | None
    power_mode: str | None
    power_w: float | None
    throttle_events: int

    @property
    def why_not(self) -> str:
        """Why this device should be given less to do, empty if nothing speaks against it."""
        if self.hot:
            return f"hot: {self.hottest_c:.0f} °C, throttles at {self.passive_c:.0f}"
        if 0 < self.memory_available_bytes < self.memory_total_bytes * _LOW_MEMORY_SHARE:
            return f"short of memory: {self.memory_available_bytes / 2**20:.0f} MiB are free"
        return ""


class HealthReader:
    """Reads the health of a device; keeps what is needed to tell changes and to avoid flapping."""

    def __init__(self, profile: Profile, root: Path = Path("/")) -> None:
        self._root = root
        self._thermal = profile.thermal
        self._modes = profile.power_modes
        self._zones = sorted((root / "sys/class/thermal").glob("thermal_zone*"))
        self._hwmons = {path: read_text(path / "name") for path in sorted((root / "sys/class/hwmon").glob("hwmon*"))}
        self._passive_c = self._passive_trip_c() or profile.thermal.passive_c
        self._hot = False
        self._events = self._throttle_count()

    def read(self) -> DeviceHealth:
        """Look now; a few dozen small reads, about a millisecond."""
        memory = memory_figures(self._root)
        temperatures_c = self._temperatures_c()
        hottest_c = max(temperatures_c.values(), default=None)
        self._hot = self._is_hot(hottest_c)
        events = self._throttle_count()
        fresh, self._events = max(0, events - self._events), events
        return DeviceHealth(
            memory_total_bytes=memory.get("MemTotal", 0),
            memory_available_bytes=memory.get("MemAvailable", 0),
            temperatures_c=temperatures_c,
            hottest_c=hottest_c,
            passive_c=self._passive_c,
            hot=self._hot,
            gpu_load=self._gpu_load(),
            power_mode=read_power_mode(self._root, self._modes),
            power_w=self._power_w(),
            throttle_events=fresh,
        )

    def _is_hot(self, hottest_c: float | None) -> bool:
        if hottest_c is None:
            return False
        margin_c = self._thermal.resume_margin_c if self._hot else self._thermal.shed_margin_c
        return hottest_c >= self._passive_c - margin_c

    def _temperatures_c(self) -> dict[str, float]:
        found = {}
        for zone in self._zones:
            millidegrees = read_number(zone / "temp")
            if millidegrees is not None and _PLAUSIBLE_C[0] <= millidegrees / 1000 <= _PLAUSIBLE_C[1]:
                found[read_text(zone / "type") or zone.name] = millidegrees / 1000
        return found

    def _passive_trip_c(self) -> float | None:
        trips = []
        for zone in self._zones:
            for kind in zone.glob("trip_point_*_type"):
                millidegrees = read_number(kind.with_name(kind.name.replace("_type", "_temp")))
                if read_text(kind) == "passive" and millidegrees is not None:
                    trips.append(millidegrees / 1000)
        return min((trip for trip in trips if _PLAUSIBLE_TRIP_C[0] <= trip <= _PLAUSIBLE_TRIP_C[1]), default=None)

    def _gpu_load(self) -> float | None:
        if self._thermal.gpu_load_path is None:
            return None
        tenths_of_percent = read_number(self._root / self._thermal.gpu_load_path)
        return None if tenths_of_percent is None else min(1.0, tenths_of_percent / 1000)

    def _power_w(self) -> float | None:
        """Power of the board's input rail, or of the largest rail where none is labelled as the input."""
        rails: dict[str, float] = {}
        for path, name in self._hwmons.items():
            if name != "ina3221":
                continue
            for label in path.glob("in*_label"):
                channel = label.name.removeprefix("in").removesuffix("_label")
                millivolts, milliamperes = (
                    read_number(path / f"in{channel}_input"),
                    read_number(path / f"curr{channel}_input"),
                )
                if millivolts is not None and milliamperes is not None:
                    rails[read_text(label)] = millivolts * milliamperes / 1e6
        return rails.get("VDD_IN", max(rails.values(), default=None))

    def _throttle_count(self) -> int:
        counters = [
            counter
            for path, name in self._hwmons.items()
            if name == "soctherm_oc"
            for counter in path.glob("oc*_event_cnt")
        ]
        counters += (self._root / "sys/devices/system/cpu").glob("cpu*/thermal_throttle/core_throttle_count")
        return sum(read_number(counter) or 0 for counter in counters)


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
