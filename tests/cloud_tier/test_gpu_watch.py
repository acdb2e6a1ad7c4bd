"""GPUs as NVML tells of them: whole ones, divided ones, boards that lack figures, and none at all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cloud_tier import gpu_watch
from cloud_tier.gpu_watch import GpuMetrics, GpuWatch, import_nvml, read_gpus
from router.values.status import GpuReadings, GpuStatus
from tests.support.clocks import VirtualClock
from tests.support.fake_nvml import Card, Nvml, NVMLError, NVMLError_LibraryNotFound
from tests.support.waiting import until


def test_a_whole_gpu_tells_everything() -> None:
    nvml = Nvml(Card("H100", throttle=0x1 | 0x40))  # 0x1: idle clocks are no trouble
    assert read_gpus(nvml).gpus == (
        GpuStatus(
            index="0",
            uuid="GPU-H100",
            name="H100",
            memory_used_bytes=3 << 30,
            memory_total_bytes=8 << 30,
            utilization=0.75,
            power_w=250.5,
            temperature_c=61.0,
            throttled=("hardware thermal slowdown",),
        ),
    )
    assert nvml.open == 0


def test_a_divided_gpu_has_its_slices_beside_it() -> None:
    part = Card("1g.10gb", complete=False)
    found = read_gpus(Nvml(Card("A100"), Card("H100", slices=(part, None, part)))).gpus
    assert [gpu.index for gpu in found] == ["0", "1", "1:0", "1:2"]
    assert (found[2].uuid, found[2].utilization, found[2].memory_total_bytes) == ("GPU-1g.10gb", None, 8 << 30)


async def test_readings_follow_and_an_outage_of_nvml_is_told_and_passes() -> None:
    clock, nvml = VirtualClock(), Nvml(Card("H100"))
    async with GpuWatch(clock, lambda: nvml) as watch:
        await until(lambda: watch.readings.gpus)
        nvml.fails = NVMLError("GPU is lost")
        assert await _read_again(clock, nvml, watch, lambda: not watch.readings.gpus)
        assert watch.readings == GpuReadings(why_none="NVML: GPU is lost")
        nvml.fails = None
        assert await _read_again(clock, nvml, watch, lambda: bool(watch.readings.gpus))


async def _read_again(clock: VirtualClock, nvml: Nvml, watch: GpuWatch, holds: Any) -> bool:
    looks = nvml.looks
    while nvml.looks == looks:
        await clock.step()
        await asyncio.sleep(0.001)
    await until(holds)
    return bool(holds())


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda: Nvml(fails=NVMLError_LibraryNotFound("NVML Shared Library Not Found")), "NVML Shared Library"),
        (Nvml, "NVML finds no GPU"),
        (lambda: __import__("no_such_module_of_nvml"), "nvidia-ml-py is not installed: pip install "),
        (lambda: SimpleNamespace(NVMLError=NVMLError), "the log has the details"),
    ],
)
async def test_why_there_are_no_figures_is_told(load: Any, why: str) -> None:
    async with GpuWatch(VirtualClock(), load) as watch:
        await until(lambda: why in watch.readings.why_none)
    assert watch.readings.gpus == ()


async def test_the_real_library_answers_here_too() -> None:
    """With a driver it lists GPUs, without one it says so: either way nothing is raised and nothing is silent."""
    nvml = import_nvml()
    known = {value for name, value in vars(nvml).items() if name.startswith("nvmlClocksThrottleReason")}
    assert set(gpu_watch._THROTTLES) <= known | {nvml.nvmlClocksThrottleReasonHwThermalSlowdown}
    async with GpuWatch(VirtualClock()) as watch:
        await until(lambda: watch.readings.why_none != "not read yet")
    assert bool(watch.readings.gpus) != bool(watch.readings.why_none)


def test_the_gauges_show_what_is_told_and_no_more() -> None:
    registry = CollectorRegistry()
    partly = GpuStatus(index="0:1", uuid="MIG-2", name="1g.10gb", memory_used_bytes=5)
    readings = GpuReadings(gpus=(GpuStatus(index="0", uuid="GPU-1", name="H100", utilization=0.5), partly))
    registry.register(GpuMetrics(lambda: readings))
    lines = generate_latest(registry).decode().splitlines()
    assert 'overspill_gpu_utilization{gpu="0",name="H100",uuid="GPU-1"} 0.5' in lines
    assert 'overspill_gpu_memory_used_bytes{gpu="0:1",name="1g.10gb",uuid="MIG-2"} 5.0' in lines
    assert not any(line.startswith('overspill_gpu_power_watts{gpu="0"') for line in lines)
