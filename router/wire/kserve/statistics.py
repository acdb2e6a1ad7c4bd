"""What a model has done, as V2's statistics extension tells it."""

from __future__ import annotations

from router.values.status import Tally
from router.wire.kserve.call import VERSION


def model_statistics(name: str, tally: Tally, last_ms: int) -> dict[str, object]:
    """Return the figures of a model since the tier started.

    A prompt is an inference and an execution: what is computed together is the replica's affair. The time on a replica
    is all told as inference, network included; what never reached one is in no model's figures.

    Args:
        last_ms: when its last request ended, in milliseconds since 1970; 0 where none has.
    """
    computed_s = max(0.0, tally.answered_s - tally.waited_s)
    return {
        "name": name,
        "version": VERSION,
        "last_inference": last_ms,
        "inference_count": tally.answered,
        "execution_count": tally.answered,
        "inference_stats": {
            "success": _duration(tally.answered, tally.answered_s),
            "fail": _duration(tally.failed, tally.failed_s),
            "queue": _duration(tally.answered, tally.waited_s),
            "compute_input": _duration(tally.answered, 0.0),
            "compute_infer": _duration(tally.answered, computed_s),
            "compute_output": _duration(tally.answered, 0.0),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "batch_stats": [],
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}
