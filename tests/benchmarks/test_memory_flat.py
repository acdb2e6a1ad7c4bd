"""The benchmark of a dispatcher's memory runs, at a size that says nothing of memory."""

from __future__ import annotations

from benchmarks.memory_flat import SAMPLES, serve
from router.simulation.loop import run_virtually


def test_every_request_ends_and_memory_is_sampled() -> None:
    row = run_virtually(lambda loop: serve(loop, 2 * SAMPLES))
    assert sum(row["outcomes"].values()) == 2 * SAMPLES
    assert len(row["samples"]) == SAMPLES
    assert row["outcomes"]["answered"] > 0
