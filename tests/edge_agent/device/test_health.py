"""Identity and health from faked /proc and /sys trees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from edge_agent.config import EdgeConfig
from edge_agent.device.health import HealthReader, ZoneHeat
from edge_agent.report import profile_lines
from hardware_profiles.facts import read_facts
from hardware_profiles.loader import BUILTIN_DIR, Power, load_profiles, match_profile
from router.base.config import decode

PROFILES = load_profiles()


def write(root: Path, path: str, text: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text.encode())


@pytest.fixture
def orin_nano(tmp_path: Path) -> Path:
    """The files of an Orin Nano 8 GB in 25 W mode, at 48 °C."""
    write(tmp_path, "proc/device-tree/model", "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0")
    write(
        tmp_path,
        "proc/device-tree/compatible",
        "nvidia,p3768-0000+p3767-0005-super\0nvidia,p3767-0005\0nvidia,tegra234\0",
    )
    write(tmp_path, "proc/meminfo", "MemTotal:        7802000 kB\nMemFree:  1000 kB\nMemAvailable:    5200000 kB\n")
    write(tmp_path, "proc/cpuinfo", "".join(f"processor\t: {n}\nCPU part\t: 0xd42\n\n" for n in range(6)))
    write(tmp_path, "etc/nv_tegra_release", "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n")
    write(tmp_path, "var/lib/nvpmodel/status", "pmode:0001")
    write(
        tmp_path,
        "etc/nvpmodel.conf",
        "< POWER_MODEL ID=0 NAME=15W >\nCPU_ONLINE CORE_0 1\n< POWER_MODEL ID=1 NAME=25W >\n",
    )
    write(tmp_path, "sys/class/devfreq/17000000.gpu/device/load", "437\n")
    for number, (kind, temperature) in enumerate(
        [("cpu-thermal", "48000"), ("gpu-thermal", "46500"), ("cv0-thermal", "")]
    ):
        zone = f"sys/class/thermal/thermal_zone{number}"
        write(tmp_path, f"{zone}/type", f"{kind}\n")
        write(tmp_path, f"{zone}/temp", temperature)
    write(tmp_path, "sys/class/thermal/thermal_zone0/trip_point_0_type", "passive\n")
    write(tmp_path, "sys/class/thermal/thermal_zone0/trip_point_0_temp", "99000\n")
    write(tmp_path, "sys/class/thermal/thermal_zone0/trip_point_1_type", "critical\n")
    write(tmp_path, "sys/class/thermal/thermal_zone0/trip_point_1_temp", "104500\n")
    write(tmp_path, "sys/class/hwmon/hwmon1/name", "ina3221\n")
    for channel, (label, millivolts, milliamperes) in enumerate(
        [("VDD_IN", 19000, 800), ("VDD_CPU_GPU_CV", 19000, 300)], start=1
    ):
        write(tmp_path, f"sys/class/hwmon/hwmon1/in{channel}_label", f"{label}\n")
        write(tmp_path, f"sys/class/hwmon/hwmon1/in{channel}_input", f"{millivolts}\n")
        write(tmp_path, f"sys/class/hwmon/hwmon1/curr{channel}_input", f"{milliamperes}\n")
    write(tmp_path, "sys/class/hwmon/hwmon2/name", "soctherm_oc\n")
    for number in (1, 2, 3):
        write(tmp_path, f"sys/class/hwmon/hwmon2/oc{number}_event_cnt", "4\n")
    return tmp_path


def test_facts_of_a_jetson(orin_nano: Path) -> None:
    facts = read_facts(orin_nano, architecture="aarch64")
    assert facts.board == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert facts.compatible[-1] == "nvidia,tegra234"
    assert facts.memory_bytes == 7802000 * 1024
    assert (facts.cpu_count, facts.l4t) == (6, "36.4.3")
    match = match_profile(facts)
    assert match.profile.name == "jetson-orin-nano-8gb"
    assert "tegra234" in match.reason


def test_the_profile_is_shown_with_what_the_data_sheet_and_the_sensors_say(orin_nano: Path) -> None:
    config = decode({"agent": {"profile": "jetson-orin-nano-8gb"}}, EdgeConfig, source="test")
    shown = "\n".join(profile_lines(config, orin_nano))
    hardware = PROFILES["jetson-orin-nano-8gb"].hardware
    assert f"figures       {hardware.cpu_cores} cores, " in shown
    assert "25W (25 W) ×" in shown
    assert "cpu-thermal 48 °C (throttles at 99, powers off at 104.5), power mode 25W, 15.2 W (VDD_IN)" in shown


def test_an_unknown_board_is_told_what_matched_and_how_to_write_a_profile_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, "proc/device-tree/model", "Robot 3\0")
    write(tmp_path, "proc/device-tree/compatible", "acme,robot-3\0nvidia,tegra194\0")
    config = decode({"agent": {"profile": "auto"}}, EdgeConfig, source="test")
    shown = "\n".join(profile_lines(config, tmp_path))
    for told in ("generic-jetson", "nvidia,tegra194", "agent.profiles_dir", str(BUILTIN_DIR / "generic-jetson.toml")):
        assert told in shown


def test_health_of_a_jetson(orin_nano: Path) -> None:
    reader = HealthReader(PROFILES["jetson-orin-nano-8gb"], orin_nano)
    health = reader.read()
    assert health.temperatures_c == {"cpu-thermal": 48.0, "gpu-thermal": 46.5}  # the third zone is off
    assert (health.hottest_c, health.hot) == (48.0, False)
    assert health.nearest == ZoneHeat("cpu-thermal", 48.0, 99.0)
    assert health.gpu_load == pytest.approx(0.437)
    assert health.power_mode == "25W"
    assert health.power_w == pytest.approx(15.2)
    assert health.memory_available_bytes == 5200000 * 1024
    assert health.throttle_events == 0
    write(orin_nano, "sys/class/hwmon/hwmon2/oc2_event_cnt", "9\n")
    assert reader.read().throttle_events == 5
    assert reader.read().throttle_events == 0


def test_heat_sheds_below_the_trip_point_and_resumes_later(orin_nano: Path) -> None:
    reader = HealthReader(PROFILES["jetson-orin-nano-8gb"], orin_nano)

    def hot_at(celsius: float) -> bool:
        write(orin_nano, "sys/class/thermal/thermal_zone1/temp", f"{int(celsius * 1000)}\n")
        return reader.read().hot

    assert [hot_at(t) for t in (88, 89, 86, 85, 83.9, 88)] == [False, True, True, True, False, False]
    hot_at(90)
    assert "gpu-thermal" in reader.read().why_not


def test_little_free_memory_speaks_against_more_work(orin_nano: Path) -> None:
    reader = HealthReader(PROFILES["jetson-orin-nano-8gb"], orin_nano)
    assert reader.read().why_not == ""
    write(orin_nano, "proc/meminfo", "MemTotal:  7802000 kB\nMemAvailable:  204800 kB\n")
    assert reader.read().why_not == "short of memory: 200 MiB are free"


def test_a_board_without_any_of_it_still_reads(tmp_path: Path) -> None:
    health = HealthReader(PROFILES["generic-x86-cpu"], tmp_path).read()
    assert health.temperatures_c == {}
    assert (health.hot, health.gpu_load, health.power_mode, health.power_w) == (False, None, None, None)
    assert health.nearest is None
    facts = read_facts(tmp_path, architecture="x86_64")
    assert facts.memory_bytes == 0
    assert facts.board is None


def test_the_power_mode_is_named_by_the_profile_where_the_board_has_no_table(orin_nano: Path) -> None:
    (orin_nano / "etc/nvpmodel.conf").unlink()
    assert HealthReader(PROFILES["jetson-orin-nano-8gb"], orin_nano).read().power_mode == "25W"


def test_this_machine_reads() -> None:
    facts = read_facts()
    assert facts.memory_bytes > 0
    assert facts.cpu_count > 0


# --- heat: every zone against its own trip points --------------------------------------------------------------------


def write_zone(root: Path, number: int, kind: str, celsius: float, trips: dict[str, float]) -> None:
    zone = f"sys/class/thermal/thermal_zone{number}"
    write(root, f"{zone}/type", f"{kind}\n")
    write(root, f"{zone}/temp", f"{int(celsius * 1000)}\n")
    for index, (trip, limit_c) in enumerate(trips.items()):
        write(root, f"{zone}/trip_point_{index}_type", trip.partition("#")[0] + "\n")
        write(root, f"{zone}/trip_point_{index}_temp", f"{int(limit_c * 1000)}\n")


def test_a_zone_is_compared_with_its_own_trip_point_and_with_no_other(tmp_path: Path) -> None:
    write_zone(tmp_path, 0, "cpu-thermal", 80, {"passive": 99, "critical": 104.5})
    write_zone(tmp_path, 1, "tboard-thermal", 50, {"passive": 70})
    reader = HealthReader(PROFILES["jetson-agx-orin-64gb"], tmp_path)
    health = reader.read()
    assert not health.hot, "80 °C is hot for the board, which is at 50, and not for the CPU"
    assert health.nearest == ZoneHeat("cpu-thermal", 80.0, 99.0)
    write_zone(tmp_path, 1, "tboard-thermal", 61, {"passive": 70})
    health = reader.read()
    assert health.hot, "within 10 °C of its own trip point, while the hottest zone is not"
    assert health.nearest == ZoneHeat("tboard-thermal", 61.0, 70.0)
    assert health.hottest_c == 80.0
    assert "tboard-thermal" in health.why_not


@pytest.mark.parametrize(
    ("trips", "throttles_at_c"),
    [
        ({"active": 62, "active#2": 75, "passive": 99, "critical": 104.5}, 99.0),  # fans are no throttling
        ({"hot": 97, "critical": 105}, 97.0),
        ({"passive": 95, "passive#2": 90, "hot": 85}, 90.0),
        ({"critical": 85}, 85.0),
        ({"critical": 110}, 99.0),  # far above where the profile says that the board slows down
        ({}, 99.0),
        ({"passive": -274, "critical": 0}, 99.0),  # not set: what x86 packages show
    ],
)
def test_which_trip_points_throttle(tmp_path: Path, trips: dict[str, float], throttles_at_c: float) -> None:
    write_zone(tmp_path, 0, "cpu-thermal", 70, trips)
    health = HealthReader(PROFILES["jetson-agx-orin-64gb"], tmp_path).read()
    assert health.nearest == ZoneHeat("cpu-thermal", 70.0, throttles_at_c)


def test_a_sensor_that_always_says_one_hundred_is_left_out(tmp_path: Path) -> None:
    """As on Xavier and older boards; and two zones of one name are both read."""
    write_zone(tmp_path, 0, "PMIC-Die", 100, {"critical": 120})
    write_zone(tmp_path, 1, "soc-thermal", 95, {"passive": 99})
    write_zone(tmp_path, 2, "soc-thermal", 40, {"passive": 99})
    health = HealthReader(PROFILES["jetson-agx-orin-64gb"], tmp_path).read()
    assert health.temperatures_c == {"soc-thermal": 95.0, "soc-thermal#2": 40.0}
    assert health.hot


# --- power: the board's draw, from the rails that it has --------------------------------------------------------------


def write_ina3221(root: Path, number: int, rails: dict[str, tuple[int, int]]) -> None:
    """One monitor: rail by label, in millivolts and milliamperes; newer kernels add the sum of the shunts as in7."""
    chip = f"sys/class/hwmon/hwmon{number}"
    write(root, f"{chip}/name", "ina3221\n")
    for channel, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
        write(root, f"{chip}/in{channel}_label", f"{label}\n")
        write(root, f"{chip}/in{channel}_input", f"{millivolts}\n")
        write(root, f"{chip}/curr{channel}_input", f"{milliamperes}\n")
    write(root, f"{chip}/in7_label", "sum of shunt voltages\n")
    write(root, f"{chip}/in7_input", "40\n")


def orin_nano_rails(root: Path) -> None:
    write_ina3221(root, 1, {"VDD_IN": (5000, 1600), "VDD_CPU_GPU_CV": (5000, 600), "VDD_SOC": (5000, 300)})


def agx_orin_rails(root: Path) -> None:
    write_ina3221(root, 3, {"VDD_GPU_SOC": (20000, 500), "VDD_CPU_CV": (20000, 200), "VIN_SYS_5V0": (5000, 1000)})
    write_ina3221(root, 4, {"NC": (0, 0), "VDDQ_VDD2_1V8AO": (5000, 200)})


def thor_rails(root: Path, *, input_monitor: bool = True) -> None:
    write_ina3221(root, 3, {"VDD_GPU": (20000, 1000), "VDD_CPU_SOC_MSS": (20000, 500), "VIN_SYS_5V0": (5000, 1000)})
    if input_monitor:
        write(root, "sys/class/hwmon/hwmon5/name", "ina238\n")
        write(root, "sys/class/hwmon/hwmon5/in1_input", "20000\n")
        write(root, "sys/class/hwmon/hwmon5/curr1_input", "2500\n")
        write(root, "sys/class/hwmon/hwmon5/power1_input", "50000000\n")


def agx_xavier_rails(root: Path) -> None:
    write_ina3221(root, 1, {"GPU": (19000, 100), "CPU": (19000, 200), "SOC": (19000, 100)})
    write_ina3221(root, 2, {"CV": (19000, 0), "VDDRQ": (19000, 100), "SYS5V": (5000, 400)})


@pytest.mark.parametrize(
    ("profile", "rails", "watts", "of"),
    [
        ("jetson-orin-nano-8gb", orin_nano_rails, 8.0, ("VDD_IN",)),
        ("jetson-orin-nx-16gb", orin_nano_rails, 8.0, ("VDD_IN",)),
        ("jetson-agx-orin-64gb", agx_orin_rails, 10 + 4 + 5, ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")),
        ("jetson-thor-128gb", thor_rails, 50.0, ("VIN",)),
        ("generic-jetson", agx_orin_rails, 19.0, ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")),
        (
            "generic-jetson",
            agx_xavier_rails,
            1.9 + 3.8 + 1.9 + 0 + 1.9 + 2,
            ("GPU", "CPU", "SOC", "CV", "VDDRQ", "SYS5V"),
        ),
    ],
    ids=["orin-nano", "orin-nx", "agx-orin", "thor", "generic-agx-orin", "agx-xavier"],
)
def test_the_power_of_a_board_is_that_of_its_input_rails(
    tmp_path: Path, profile: str, rails: Callable[[Path], None], watts: float, of: tuple[str, ...]
) -> None:
    rails(tmp_path)
    health = HealthReader(PROFILES[profile], tmp_path).read()
    assert health.power_w == pytest.approx(watts)
    assert health.power_rails == of


def test_thor_without_its_input_monitor_sums_the_module_rails(tmp_path: Path) -> None:
    thor_rails(tmp_path, input_monitor=False)
    health = HealthReader(PROFILES["jetson-thor-128gb"], tmp_path).read()
    assert health.power_w == pytest.approx(20 + 10 + 5)


def test_rails_that_nobody_knows_are_not_guessed_at(tmp_path: Path) -> None:
    write_ina3221(tmp_path, 1, {"VCC_12V": (12000, 1000), "VCC_5V": (5000, 1000)})
    assert HealthReader(PROFILES["generic-jetson"], tmp_path).read().power_w is None
    own = msgspec.structs.replace(PROFILES["generic-jetson"], power=Power(input_rails=("VCC_12V",)))
    assert HealthReader(own, tmp_path).read().power_w == pytest.approx(12.0)


def test_half_a_sum_is_no_power(tmp_path: Path) -> None:
    agx_orin_rails(tmp_path)
    (tmp_path / "sys/class/hwmon/hwmon3/curr1_input").unlink()
    health = HealthReader(PROFILES["jetson-agx-orin-64gb"], tmp_path).read()
    assert (health.power_w, health.power_rails) == (None, ())
