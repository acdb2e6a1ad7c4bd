"""Every profile loads, every device of the table finds its own, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_profiles.loader import BUILTIN_DIR, DeviceFacts, choose_profile, load_profiles, match_profile
from router.base.errors import ConfigError

GIB = 2**30


def jetson(board: str, gib: float, chip: str = "nvidia,tegra234") -> DeviceFacts:
    return DeviceFacts("aarch64", int(gib * GIB), 6, board=board, compatible=("nvidia,board", chip), l4t="36.4.3")


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (jetson("NVIDIA Jetson Orin Nano Developer Kit", 7.4), "jetson-orin-nano-8gb"),
        (jetson("NVIDIA Jetson AGX Orin Developer Kit", 61.4), "jetson-agx-orin-64gb"),
        (DeviceFacts("x86_64", 24 * GIB, 2), "generic-x86-cpu"),
        (DeviceFacts("AMD64", 8 * GIB, 4), "generic-x86-cpu"),
    ],
)
def test_devices_find_their_profile(facts: DeviceFacts, name: str) -> None:
    match = match_profile(facts)
    assert match.profile.name == name
    assert match.reason


@pytest.mark.parametrize(
    "facts",
    [
        jetson("NVIDIA Jetson Orin Nano 4GB", 3.3),
        jetson("NVIDIA Jetson AGX Orin 32GB", 29.8),
        jetson("NVIDIA Jetson AGX Xavier", 30, chip="nvidia,tegra194"),
        DeviceFacts("riscv64", 8 * GIB, 4),
    ],
)
def test_a_device_of_no_class_is_told_what_to_set(facts: DeviceFacts) -> None:
    with pytest.raises(ConfigError, match=r"agent\.profile") as raised:
        match_profile(facts)
    assert "jetson-orin-nano-8gb" in raised.value.message


def test_figures_of_the_jetsons_are_those_of_the_data_sheets() -> None:
    nano, agx = (load_profiles()[name] for name in ("jetson-orin-nano-8gb", "jetson-agx-orin-64gb"))
    assert (nano.hardware.memory_bytes_per_s, nano.hardware.int8_dense_tops, nano.hardware.cpu_cores) == (102e9, 33, 6)
    assert (agx.hardware.memory_bytes_per_s, agx.hardware.int8_dense_tops, agx.hardware.cpu_cores) == (205e9, 138, 12)
    assert {mode.name: mode.id for mode in nano.power_modes} == {"15W": 0, "25W": 1, "MAXN_SUPER": 2, "7W": 3}
    assert {mode.name: mode.id for mode in agx.power_modes} == {"MAXN": 0, "15W": 1, "30W": 2, "50W": 3}
    assert nano.thermal.critical_c == agx.thermal.critical_c == 104.5


def test_priors_scale_with_size_and_precision() -> None:
    profile = load_profiles()["generic-x86-cpu"]
    same = profile.prior(134_515_008, "int8")
    assert same.decode_tokens_per_s == 95.0
    assert "scaled" not in same.source
    half = profile.prior(134_515_008 // 2, "int8")
    assert half.decode_tokens_per_s == pytest.approx(190)
    assert "scaled ×2.00" in half.source
    assert profile.prior(134_515_008, "fp32").decode_tokens_per_s == 48.0
    assert "scaled" in profile.prior(134_515_008, "fp16").source


@pytest.mark.parametrize("path", sorted(BUILTIN_DIR.glob("*.toml")), ids=lambda path: path.stem)
def test_every_prior_says_where_it_comes_from(path: Path) -> None:
    profile = load_profiles()[path.stem]
    assert all(
        prior.source.split(":")[0].split(",")[0] in ("measured", "published", "estimate") for prior in profile.priors
    )


def copy_of(name: str, directory: Path, old: str, new: str) -> None:
    text = (BUILTIN_DIR / f"{name}.toml").read_text(encoding="utf-8")
    assert old in text
    (directory / f"{name}.toml").write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "kv_slots = 4",
            "kv_slot = 4",
            r"cpu.toml:\d+: unknown key `serving.kv_slot`; did you mean `kv_slots`",
        ),
        ("kv_slots = 4", "kv_slots = 0", r"`serving.kv_slots`"),
        ("kv_slots = 4", 'kv_slots = "4"', r"serving.kv_slots"),
        ("critical_c = 105.0", "critical_c = 90.0", "must be above passive_c"),
        ('name = "generic-x86-cpu"', 'name = "other"', "must equal the file name"),
        ('providers = ["cpu"]', 'providers = ["gpu"]', "providers"),
        ("[serving]", "[serving", "not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    copy_of("generic-x86-cpu", tmp_path, old, new)
    with pytest.raises(ConfigError, match=message):
        load_profiles(tmp_path)


def test_own_profiles_replace_built_in_ones(tmp_path: Path) -> None:
    copy_of("generic-x86-cpu", tmp_path, "kv_slots = 4", "kv_slots = 2")
    match = choose_profile("auto", DeviceFacts("x86_64", GIB, 1), tmp_path)
    assert match.profile.serving.kv_slots == 2
    with pytest.raises(ConfigError, match="does not exist"):
        load_profiles(tmp_path / "nowhere")


def test_a_profile_is_chosen_by_name() -> None:
    facts = DeviceFacts("x86_64", GIB, 1)
    assert choose_profile("jetson-agx-orin-64gb", facts).reason == "chosen by agent.profile"
    with pytest.raises(ConfigError, match="unknown profile `jetson`"):
        choose_profile("jetson", facts)
