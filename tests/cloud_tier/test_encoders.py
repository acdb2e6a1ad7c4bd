"""Sentence encoders of a cloud tier in their processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cloud_tier.config import ModelConfig
from cloud_tier.encoders.lineup import line_up_encoders
from models.catalogue.families import load_catalogue
from models.pipelines.embedding import Text
from models.pipelines.pipeline import Pipeline
from models.store.store import ModelStore
from router.base.clock import MonotonicClock
from router.base.errors import RequestFailed
from tests.support.waiting import until_answered


@pytest.mark.real_model
async def test_a_process_that_stands_still_is_ended_and_begun_anew(models_root: Path) -> None:
    entry = ModelConfig(variant="all-minilm-l6-v2", device="cpu", step_timeout_s=1.0, threads=1)
    catalogue = load_catalogue()
    (served,) = line_up_encoders([entry], catalogue, ModelStore(models_root, catalogue))
    pipeline = Pipeline(served.plan(), MonotonicClock(), lambda _: None)
    await pipeline.open()
    try:
        (process,) = pipeline._processes

        async def ask(text: str) -> int:
            (vector,) = (await pipeline.run([Text(text, None)], priority=0, due_s=float("inf"), cost=4)).results
            return len(vector.values)

        assert await ask("before") == 384
        frozen = process.pid
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)
        with pytest.raises(RequestFailed, match="did not return within 1 s"):
            await ask("while it stands still")

        async def answered() -> bool:
            try:
                return await ask("after") == 384
            except RequestFailed:  # a machine may be so slow that even this takes longer
                return False

        await until_answered(answered)
        assert process.pid not in {None, frozen}
    finally:
        await pipeline.close()
