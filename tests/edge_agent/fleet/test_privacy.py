"""What the fleet said about privacy outlives damage, kills and a full disk; a site's own privacy is a floor."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from edge_agent.fleet.steering import Steering
from router.base.errors import ConfigError
from router.fleetwire.documents import DesiredConfig, encode
from router.values.settings import RouterSettings
from tests.support.paths import REPOSITORY
from tests.support.steered_agent import Life, ModelessAgent

PRIVATE: dict[str, Any] = {"policy": "local-only", "max_queue": 12}
LONG: dict[str, Any] = {**PRIVATE, **{f"{number:03}" * 300: None for number in range(20)}}
"""The same, of several pages: null is no override."""


def want(version: int, models: dict[str, Any] | None = None, **router: Any) -> DesiredConfig:
    return DesiredConfig(version=version, issued_at=datetime.now(timezone.utc), router=router, models=models or {})


async def told(folder: Path, *documents: DesiredConfig) -> None:
    """One life that obeys documents and ends."""
    async with Life(folder) as life:
        for document in documents:
            await life.configurator.obey(encode(document))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: truncate(folder / "desired.json"),
        lambda folder: (folder / "desired.json").write_bytes(b""),
        lambda folder: (folder / "desired.json").write_bytes(b"[" * 100_000),
        lambda folder: [path.write_bytes(b"\0" * 40) for path in folder.iterdir()],
        lambda folder: (folder / "desired.json").unlink(),
    ],
    ids=["truncated", "empty", "nested", "every-file-zeroed", "gone"],
)
async def test_fleet_set_local_only_survives_a_damaged_desired_json(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    await told(tmp_path, want(1, **PRIVATE))
    damage(tmp_path)
    async with Life(tmp_path) as life:
        assert life.policy == "local-only"


async def test_the_generation_before_stands_in_for_a_damaged_desired_json(tmp_path: Path) -> None:
    await told(tmp_path, want(1, policy="local-only", max_queue=12), want(2, policy="local-only", max_queue=13))
    truncate(tmp_path / "desired.json")
    async with Life(tmp_path) as life:
        assert (life.policy, life.agent.config.router.max_queue) == ("local-only", 12)
        await life.configurator.obey(encode(want(2, policy="local-only", max_queue=13)))
        assert life.agent.config.router.max_queue == 13
        assert life.configurator.standing.state == "applied"


async def test_one_override_that_cannot_be_applied_drops_only_itself(tmp_path: Path) -> None:
    async with Life(tmp_path) as life:
        variants = ["smollm2-135m-int8"]
        models = {"variants": variants, "preload": variants, "kv_slots": 3}
        await life.configurator.obey(encode(want(1, models, **PRIVATE)))
        assert life.configurator.standing.state == "applied"
    content = (tmp_path / "desired.json").read_bytes()
    (tmp_path / "desired.json").write_bytes(content.replace(b'"smollm2-135m-int8"', b'"gone-int8"'))
    async with Life(tmp_path) as life:
        config, standing = life.agent.config, life.configurator.standing
        assert (config.router.policy, config.router.max_queue, config.models.kv_slots) == ("local-only", 12, 3)
        assert config.models.variants == ModelessAgent().config.models.variants
        assert standing.state == "partial"
        assert standing.key in {"models.variants", "models.preload"}
        assert "gone-int8" in standing.reason
        assert standing.overrides == {"router": PRIVATE, "models": {"kv_slots": 3}}


async def test_a_key_this_agent_no_longer_knows_drops_only_itself(tmp_path: Path) -> None:
    await told(tmp_path, want(1, overload_enter=0.9, overload_leave=0.8, breaker={"failures": 9}, **PRIVATE))
    content = (tmp_path / "desired.json").read_bytes()
    (tmp_path / "desired.json").write_bytes(content.replace(b'"max_queue"', b'"no_such_key"'))
    async with Life(tmp_path) as life:
        router = life.agent.config.router
        assert (router.policy, router.max_queue, router.breaker.failures) == ("local-only", 64, 9)
        assert (router.overload_enter, router.overload_leave) == (0.9, 0.8)
        assert life.configurator.standing.key == "router.no_such_key"


async def test_overrides_that_need_each_other_are_restored_together(tmp_path: Path) -> None:
    """Neither of the two applies without the other, and a third one no longer applies at all."""
    first, other = ["smollm2-135m-int8"], ["smollm2-135m-pruned-int8"]
    file = {"variants": first, "preload": first}
    async with Life(tmp_path, ModelessAgent(models=file)) as life:
        await life.configurator.obey(encode(want(1, {"variants": other, "preload": other}, **PRIVATE)))
    content = (tmp_path / "desired.json").read_bytes()
    (tmp_path / "desired.json").write_bytes(content.replace(b'"max_queue"', b'"no_such_key"'))
    async with Life(tmp_path, ModelessAgent(models=file)) as life:
        models = life.agent.config.models
        assert (models.variants, models.preload) == (tuple(other), tuple(other))
        assert life.policy == "local-only"
        assert life.configurator.standing.key == "router.no_such_key"


KILLED = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    from tests.support.steered_agent import Life, ModelessAgent

    async def main():
        agent = ModelessAgent()
        agent.kill_on_models = True
        async with Life(Path(sys.argv[1]), agent) as life:
            print(life.policy, life.agent.config.router.max_queue, life.configurator.standing.state)

    asyncio.run(main())
    """
)


def killed(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", KILLED, str(folder)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


@pytest.mark.process
async def test_five_kills_during_the_start_do_not_drop_local_only(tmp_path: Path) -> None:
    await told(tmp_path, want(1, {"kv_slots": 3}, **PRIVATE))
    for life in range(6):
        ended = await asyncio.to_thread(killed, tmp_path)
        if life < 5:
            assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "local-only 12 partial"


@pytest.mark.parametrize("content", [b"", b"anything", b"any\n\0\0", b"\xff" * 9])
async def test_an_unreadable_privacy_record_means_local_only_until_the_broker_says_otherwise(
    tmp_path: Path, content: bytes
) -> None:
    document = want(3, policy="cloud-first")
    await told(tmp_path, document)
    (tmp_path / "privacy").write_bytes(content)
    async with Life(tmp_path) as life:
        assert life.policy == "local-only"
        assert life.configurator.standing.privacy_held
        await life.configurator.obey(encode(want(2, policy="quality-in-objective")))
        assert life.policy == "local-only", "a stale document is no word of the broker"
        await life.configurator.obey(encode(want(4, policy="no-such-policy")))
        assert life.policy == "local-only", "nor is one that is refused"
    async with Life(tmp_path) as life:
        assert life.policy == "local-only", "and it is kept over a further restart"
        await life.configurator.obey(encode(want(5, policy="cloud-first")))
        assert life.policy == "cloud-first"
        assert not life.configurator.standing.privacy_held
    async with Life(tmp_path) as life:
        assert life.policy == "cloud-first"


async def test_the_same_document_again_releases_a_held_privacy(tmp_path: Path) -> None:
    document = want(3, policy="cloud-first")
    await told(tmp_path, document)
    (tmp_path / "privacy").write_bytes(b"")
    async with Life(tmp_path) as life:
        assert life.policy == "local-only"
        await life.configurator.obey(encode(document))
        assert life.policy == "cloud-first"
        assert life.configurator.standing.state == "applied"


async def test_a_state_folder_of_before_the_privacy_record_is_read(tmp_path: Path) -> None:
    await told(tmp_path, want(1, **PRIVATE))
    (tmp_path / "privacy").unlink()
    async with Life(tmp_path) as life:
        assert life.policy == "local-only"
    (tmp_path / "privacy").unlink()
    truncate(tmp_path / "desired.json")
    (tmp_path / "desired.json.previous").unlink(missing_ok=True)
    async with Life(tmp_path) as life:
        assert life.policy == "local-only", "damaged, and nothing else says what it was"


async def test_a_device_that_was_never_told_anything_keeps_to_its_file(tmp_path: Path) -> None:
    for _ in range(2):
        async with Life(tmp_path) as life:
            assert life.policy == RouterSettings().policy
            assert life.configurator.standing.state == "none"


async def test_taking_local_only_away_is_remembered_too(tmp_path: Path) -> None:
    await told(tmp_path, want(1, **PRIVATE), want(2, max_queue=12))
    async with Life(tmp_path) as life:
        assert life.policy == RouterSettings().policy
        assert not life.configurator.standing.privacy_held


@pytest.mark.parametrize("policy", ["cloud-first", "quality-in-objective", "local-first", "smallest-rung"])
async def test_a_sites_local_only_is_a_floor_for_every_fleet_document(tmp_path: Path, policy: str) -> None:
    async with Life(tmp_path, ModelessAgent(router={"policy": "local-only"})) as life:
        await life.configurator.obey(encode(want(1, policy=policy, max_queue=9)))
        standing = life.configurator.standing
        assert (standing.state, standing.key) == ("refused", "router.policy")
        assert "file" in standing.reason
        assert (life.policy, life.agent.config.router.max_queue) == ("local-only", 64)
        await life.configurator.obey(encode(want(2, max_queue=9)))
        assert (life.policy, life.agent.config.router.max_queue) == ("local-only", 9)


async def test_a_file_that_became_local_only_is_not_loosened_by_what_is_stored(tmp_path: Path) -> None:
    await told(tmp_path, want(1, policy="cloud-first", max_queue=9))
    async with Life(tmp_path, ModelessAgent(router={"policy": "local-only"})) as life:
        assert (life.policy, life.agent.config.router.max_queue) == ("local-only", 9)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, 64 KiB large."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("file systems can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    return filler


@pytest.mark.process
async def test_a_full_disk_is_told_and_local_only_outlives_it_all_the_same(small_disk: Path) -> None:
    async with Life(small_disk) as life:
        await life.configurator.obey(encode(want(1, max_queue=9)))
        assert life.configurator.standing.reported().state == "applied"
        filler = fill(small_disk)
        await life.configurator.obey(encode(want(2, **LONG)))
        reported = life.configurator.standing.reported()
        assert (life.policy, reported.state, reported.applied_version) == ("local-only", "applied-volatile", 2)
        assert "No space left" in reported.reason
    async with Life(small_disk) as life:
        assert life.policy == "local-only"
        await life.configurator.obey(encode(want(3, **LONG)))
        assert life.configurator.standing.reported().state == "applied-volatile"
        filler.unlink()
        before = life.reports
        await life.configurator.save_again()
        assert life.configurator.standing.reported().state == "applied"
        assert life.reports == before + 1
    async with Life(small_disk) as life:
        assert (life.policy, life.configurator.standing.applied_version) == ("local-only", 3)


async def test_steering_names_the_floor() -> None:
    with pytest.raises(ConfigError) as refusal:
        await Steering(ModelessAgent(router={"policy": "local-only"})).apply(want(1, policy="cloud-first"))
    assert refusal.value.param == "router.policy"
