"""Every profile loads, every device of the table finds its own, and mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_profiles.loader import BUILTIN_DIR, DeviceFacts, choose_profile, load_profiles, match_profile
from router.base.cuda import Gpu
from router.base.errors import ConfigError

GIB = 2**30
ORIN_GPU = Gpu("Orin", (8, 7), 8 * GIB, 12060)


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
    ("facts", "name"),
    [
        (jetson("NVIDIA Jetson Orin Nano 4GB", 3.3), "jetson-orin-nano-4gb"),
        (jetson("NVIDIA Jetson Orin NX Engineering Reference Developer Kit", 15.3), "jetson-orin-nx-16gb"),
        (jetson("NVIDIA Orin NX Developer Kit", 7.4), "jetson-orin-nx-8gb"),
        (jetson("NVIDIA Jetson AGX Orin 32GB", 29.8), "jetson-agx-orin-32gb"),
        (jetson("NVIDIA Jetson AGX Thor Developer Kit", 122.8, chip="nvidia,tegra264"), "jetson-thor-128gb"),
        (jetson("NVIDIA Jetson T4000", 61, chip="nvidia,tegra264"), "generic-jetson"),
        (jetson("NVIDIA Jetson AGX Xavier", 30, chip="nvidia,tegra194"), "generic-jetson"),
        (jetson("A board of tomorrow", 30, chip="nvidia,tegra300"), "generic-jetson"),
        (jetson("Carrier of some maker", 15.3), "generic-jetson"),
        (
            DeviceFacts(
                "aarch64",
                15 * GIB,
                8,
                board="Carrier of some maker",
                compatible=("nvidia,p3767-0000", "nvidia,tegra234"),
            ),
            "jetson-orin-nx-16gb",
        ),
        (DeviceFacts("aarch64", 15 * GIB, 8, gpu=ORIN_GPU), "jetson-orin-nx-16gb"),
        (DeviceFacts("aarch64", 7 * GIB, 6, gpu=ORIN_GPU), "jetson-orin-nano-8gb"),
        (DeviceFacts("aarch64", 30 * GIB, 8, gpu=Gpu("Xavier", (7, 2), 30 * GIB, 11040)), "generic-jetson"),
        (
            DeviceFacts(
                "aarch64",
                8 * GIB,
                4,
                board="Raspberry Pi 5 Model B Rev 1.0",
                compatible=("raspberrypi,5-model-b", "brcm,bcm2712"),
            ),
            "raspberry-pi-5",
        ),
        (
            DeviceFacts("aarch64", 4 * GIB, 4, board="Raspberry Pi 4 Model B", compatible=("brcm,bcm2711",)),
            "generic-aarch64",
        ),
        (DeviceFacts("arm64", 16 * GIB, 8), "generic-aarch64"),
        (DeviceFacts("riscv64", 8 * GIB, 4), "generic-cpu"),
        (DeviceFacts("", 0, 1), "generic-cpu"),
    ],
)
def test_no_board_refuses_to_start(facts: DeviceFacts, name: str) -> None:
    match = choose_profile("auto", facts)
    assert match.profile.name == name
    assert match.reason


@pytest.mark.parametrize(
    ("gib", "cores", "served"),
    [(0.9, 4, (1, 1024, 3)), (3.7, 4, (2, 2048, 3)), (15.5, 8, (4, 2048, 6)), (15.5, 1, (4, 2048, 1))],
)
def test_a_generic_profile_is_fitted_to_the_memory_and_the_cores(
    gib: float, cores: int, served: tuple[int, int, int]
) -> None:
    profile = choose_profile("auto", DeviceFacts("aarch64", int(gib * GIB), cores)).profile
    serving = profile.serving
    assert (serving.kv_slots, serving.context_tokens, profile.runtime.intra_op_threads) == served


def test_a_profile_of_a_known_board_is_taken_as_it_is_written() -> None:
    facts = jetson("NVIDIA Jetson Orin Nano Developer Kit", 7.4)
    assert match_profile(facts).profile == load_profiles()["jetson-orin-nano-8gb"]


def test_of_profiles_that_fit_the_more_exact_one_wins(tmp_path: Path) -> None:
    text = (BUILTIN_DIR / "generic-jetson.toml").read_text(encoding="utf-8")
    text = text.replace('"generic-jetson"', '"my-robot"').replace('"nvidia,tegra*"', '"acme,robot-3"')
    (tmp_path / "my-robot.toml").write_text(text.replace("generic = true", "generic = false"), encoding="utf-8")
    robot = DeviceFacts("aarch64", 30 * GIB, 8, board="Robot 3", compatible=("acme,robot-3", "nvidia,tegra194"))
    match = choose_profile("auto", robot, tmp_path)
    assert match.profile.name == "my-robot"
    assert "acme,robot-3" in match.reason


def test_only_own_profiles_that_all_miss_are_refused_with_the_setting() -> None:
    with pytest.raises(ConfigError) as raised:
        match_profile(DeviceFacts("riscv64", 8 * GIB, 4), [load_profiles()["jetson-orin-nano-8gb"]])
    assert raised.value.param == "agent.profile"


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
