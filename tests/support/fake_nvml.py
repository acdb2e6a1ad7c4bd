"""NVML over cards of a test: the calls of nvidia-ml-py that are used, and its errors."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801 - NVML's own name
    pass


@dataclass
class Card:
    """A GPU as NVML answers about it: a figure it lacks is an error of NVML."""

    name: str
    slices: tuple[Card | None, ...] = ()
    complete: bool = True
    throttle: int = 0


class Nvml:
    """The calls of nvidia-ml-py that are used, over cards of a test."""

    NVML_TEMPERATURE_GPU = 0
    NVML_DEVICE_MIG_ENABLE = 1
    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound

    def __init__(self, *cards: Card, fails: Exception | None = None) -> None:
        self.cards = cards
        self.fails = fails
        self.open = 0
        self.looks = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.looks += 1
        if self.fails is not None:
            raise self.fails
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> Any:
        figures = {
            "nvmlDeviceGetCount": lambda: len(self.cards),
            "nvmlDeviceGetHandleByIndex": lambda index: self.cards[index],
            "nvmlDeviceGetName": lambda card: card.name.encode(),
            "nvmlDeviceGetUUID": lambda card: f"GPU-{card.name}",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 << 30, total=8 << 30),
            "nvmlDeviceGetUtilizationRates": lambda card: self._had(card, SimpleNamespace(gpu=75)),
            "nvmlDeviceGetPowerUsage": lambda card: self._had(card, 250_500),
            "nvmlDeviceGetTemperature": lambda card, _: self._had(card, 61),
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: self._had(card, card.throttle),
            "nvmlDeviceGetMigMode": lambda card: self._had(card, [int(bool(card.slices)), 0]),
            "nvmlDeviceGetMaxMigDeviceCount": lambda card: len(card.slices),
            "nvmlDeviceGetMigDeviceHandleByIndex": self._slice,
        }
        return figures[name]

    @staticmethod
    def _had(card: Card, figure: Any) -> Any:
        if not card.complete:
            raise NVMLError("Not Supported")
        return figure

    @staticmethod
    def _slice(card: Card, number: int) -> Card:
        found = card.slices[number]
        if found is None:
            raise NVMLError("Not Found")
        return found
