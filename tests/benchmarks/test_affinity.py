"""Chats find their prompts again among four replicas; a small run of `benchmarks/affinity.py`."""

from __future__ import annotations

from benchmarks.affinity import conversations, measure


def test_most_of_what_could_be_cached_is_and_least_load_finds_far_less() -> None:
    requests = conversations(80, 5, seed=7)
    ours = measure("slo-utility", 131_072, requests, seed=7)
    least_load = measure("least-load", 131_072, requests, seed=7)
    assert ours["answered"] == least_load["answered"] == 1.0
    assert ours["cached"] >= 0.85
    assert least_load["cached"] < ours["cached"] - 0.1
    assert ours["ttft_p50_ms"] < least_load["ttft_p50_ms"]
