"""Stages of an operator's own, as pipelines of tests name them by import path."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np


def doubled(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    return {"y": 2 * batch["x"]}


def poisoned(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Fail as a whole where one input is 13."""
    if (batch["x"] == 13).any():
        raise RuntimeError("thirteen")
    return {"y": 2 * batch["x"]}


def deadly(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """End the process where one input is negative; tell its number otherwise."""
    if (batch["x"] < 0).any():
        os._exit(9)
    return {"y": np.full_like(batch["x"], os.getpid())}


def slow(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    time.sleep(0.02 * len(batch["x"]))
    return {"y": batch["x"]}


def sizes(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Tell the sides of images, and take longer for it than decoding one does."""
    time.sleep(0.005)
    return {"sides": np.array([image.shape[:2] for image in batch["pixels"]], np.int64)}


def wrong_type(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    return {"y": batch["x"].astype(np.float64)}


def named(batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return bytes for positive numbers, and what is none for others."""
    names: dict[int, object] = {-1: None, 0: "none", 1: b"one"}
    return {"names": np.array([[names[int(x)]] for x in batch["x"][:, 0]], object)}


def no_arguments() -> None:
    """No stage."""


class Scaled:
    """Made with its options; tells which process it computes in."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._factor = np.float32(options["factor"])

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        pids = np.full((len(batch["x"]), 1), os.getpid(), np.int64)
        return {"y": self._factor * batch["x"], "pid": pids}


class Sickens:
    """Fails on 13 alone; after a negative number on everything, until it is made anew."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._sick = False

    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        self._sick = self._sick or bool((batch["x"] < 0).any())
        if self._sick:
            raise RuntimeError("sick")
        return poisoned(batch)
