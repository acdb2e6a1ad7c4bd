"""What the GPUs of this machine do, read by NVML every few seconds in a thread: memory, load, power, heat.

`nvidia-ml-py` is an optional extra and imported when a tier serves. Where it, the driver or a GPU is missing, that is
said once, and shown in place of the figures.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, final

import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.base.clock import Clock
from router.base.extras import install
from router.base.timers import end
from router.values.status import GpuReadings, GpuStatus

log = structlog.get_logger("cloud_tier")

_EVERY_S = 5.0
# Bits of `nvmlDeviceGetCurrentClocksEventReasons` that hold a GPU back against its will; idle clocks are none.
_THROTTLES = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


def import_nvml() -> Any:
    """Return the module of nvidia-ml-py.

    Raises:
        ModuleNotFoundError: the extra `nvml` is not installed.
    """
    return importlib.import_module("pynvml")


def read_gpus(nvml: Any) -> GpuReadings:
    """Read every GPU, and every MIG slice of those that are divided, once. Takes some milliseconds.

    Raises:
        nvml.NVMLError: there is no driver, or it does not answer.
    """
    nvml.nvmlInit()
    try:
        found: list[GpuStatus] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(_read(nvml, handle, str(index)))
            found += [_read(nvml, part, f"{index}:{number}") for number, part in _slices(nvml, handle)]
        return GpuReadings(gpus=tuple(found), why_none="" if found else "NVML finds no GPU")
    finally:
        nvml.nvmlShutdown()


def _slices(nvml: Any, handle: Any) -> Iterator[tuple[int, Any]]:
    mode = _told(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if mode != getattr(nvml, "NVML_DEVICE_MIG_ENABLE", 1):
        return
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        part = _told(nvml, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number))
        if part is not None:  # else a place that no slice takes
            yield number, part


def _read(nvml: Any, handle: Any, index: str) -> GpuStatus:
    memory = _told(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    percent = _told(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    milliwatts = _told(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    reasons = _told(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return GpuStatus(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        utilization=None if percent is None else percent / 100,
        power_w=None if milliwatts is None else milliwatts / 1000,
        temperature_c=_told(nvml, lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        throttled=tuple(why for bit, why in _THROTTLES.items() if reasons & bit),
    )


def _told(nvml: Any, ask: Callable[[], Any]) -> Any:
    """Return a figure, None where this GPU does not have it: boards and slices lack some."""
    try:
        return ask()
    except nvml.NVMLError:
        return None


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


@final
class GpuWatch:
    """Use as `async with`: it reads in the background until it is left.

    Attributes:
        readings: the last ones, or why there are none.
    """

    def __init__(self, clock: Clock, load: Callable[[], Any] = import_nvml) -> None:
        self.readings = GpuReadings(why_none="not read yet")
        self._clock = clock
        self._load = load
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GpuWatch:
        self._task = asyncio.create_task(self._watch(), name="gpu-watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            await end(self._task)

    async def _watch(self) -> None:
        try:
            nvml = self._load()
        except ModuleNotFoundError:
            self.readings = GpuReadings(why_none=f"nvidia-ml-py is not installed: {install('nvml')}")
            return
        while True:
            try:
                self.readings = await asyncio.to_thread(read_gpus, nvml)
            except nvml.NVMLError as error:
                told = GpuReadings(why_none=f"NVML: {error}")
                if isinstance(error, getattr(nvml, "NVMLError_LibraryNotFound", ())):  # no driver comes by itself
                    self.readings = told
                    return
                if self.readings != told:
                    log.warning("GPUs cannot be read", error=str(error))
                self.readings = told
            except Exception:  # a figure less must not cost the tier
                log.exception("GPUs cannot be read")
                self.readings = GpuReadings(why_none="they could not be read; the log has the details")
                return
            await self._clock.sleep(_EVERY_S)


class GpuMetrics(Collector):
    """The last readings as gauges."""

    def __init__(self, readings: Callable[[], GpuReadings]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """Yield one family a figure, one sample a GPU that tells it."""
        figures: dict[str, tuple[str, Callable[[GpuStatus], float | None]]] = {
            "memory_used_bytes": ("Memory in use.", lambda gpu: gpu.memory_used_bytes),
            "memory_total_bytes": ("Memory.", lambda gpu: gpu.memory_total_bytes),
            "utilization": ("Share of the last moments in which something ran.", lambda gpu: gpu.utilization),
            "power_watts": ("Power draw.", lambda gpu: gpu.power_w),
            "temperature_celsius": ("Temperature.", lambda gpu: gpu.temperature_c),
            "throttled": ("1 while its clocks are held down.", lambda gpu: float(bool(gpu.throttled))),
        }
        gpus = self._readings().gpus
        for name, (text, figure) in figures.items():
            family = GaugeMetricFamily(f"overspill_gpu_{name}", text, labels=["gpu", "uuid", "name"])
            for gpu in gpus:
                value = figure(gpu)
                if value is not None:
                    family.add_metric([gpu.index, gpu.uuid, gpu.name], value)
            yield family
