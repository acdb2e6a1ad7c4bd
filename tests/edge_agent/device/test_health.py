"""Identity and health from faked /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_agent.config import EdgeConfig
from edge_agent.device.health import HealthReader
from edge_agent.report import profile_lines
from hardware_profiles.facts import read_facts
from hardware_profiles.loader import load_profiles, match_profile
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
    assert "48 °C (throttles at 99, powers off at 104.5), power mode 25W, 15.2 W" in shown


def test_health_of_a_jetson(orin_nano: Path) -> None:
    reader = HealthReader(PROFILES["jetson-orin-nano-8gb"], orin_nano)
    health = reader.read()
    assert health.temperatures_c == {"cpu-thermal": 48.0, "gpu-thermal": 46.5}  # the third zone is off
    assert (health.hottest_c, health.passive_c, health.hot) == (48.0, 99.0, False)
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
    assert reader.read().why_not == "hot: 90 °C, throttles at 99"


def test_little_free_memory_speaks_against_more_work(orin_nano: Path) -> None:
    reader = HealthReader(PROFILES["jetson-orin-nano-8gb"], orin_nano)
    assert reader.read().why_not == ""
    write(orin_nano, "proc/meminfo", "MemTotal:  7802000 kB\nMemAvailable:  204800 kB\n")
    assert reader.read().why_not == "short of memory: 200 MiB are free"


def test_a_board_without_any_of_it_still_reads(tmp_path: Path) -> None:
    health = HealthReader(PROFILES["generic-x86-cpu"], tmp_path).read()
    assert health.temperatures_c == {}
    assert (health.hot, health.gpu_load, health.power_mode, health.power_w) == (False, None, None, None)
    assert health.passive_c == 95.0
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
