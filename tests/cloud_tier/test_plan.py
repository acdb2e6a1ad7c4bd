"""What a configuration becomes as a whole: models of every kind share one machine."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cloud_tier import lineup
from cloud_tier.config import CloudConfig, ModelConfig, ServerConfig
from cloud_tier.encoders import lineup as encoders
from cloud_tier.encoders.torch_encoder import OpenTorchEncoder
from cloud_tier.plan import Plan, make_plan
from models.pipelines.settings import ModelBatching
from tests.support.fake_engine import toy_model_directory


def threads_of_encoders(plan: Plan) -> list[int]:
    opens = [stage.open for served in plan.encoders for stage in served.plan().stages]
    return [one.threads for one in opens if isinstance(one, OpenTorchEncoder)]


SHARES = {2: (2, 1, (1,)), 8: (8, 2, (1, 2)), 12: (12, 3, (1, 2, 3)), 64: (64, 16, (1, 2, 4, 8, 15, 16))}
"""Cores → threads of an encoder alone, of three encoders' processes beside an engine, and of that engine."""


@pytest.mark.real_model
def test_all_that_compute_share_the_cores(tmp_path: Path, models_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ModelConfig(variant="all-minilm-l6-v2", device="cpu")
    two = msgspec.structs.replace(encoder, batching=ModelBatching(instances=2))
    told = msgspec.structs.replace(encoder, variant="all-minilm-l6-v2-fp32", threads=5)
    engine = ModelConfig(path=str(toy_model_directory(tmp_path / "toy")), device="cpu")
    config = CloudConfig(server=ServerConfig(models_dir=str(models_root)))
    for cores, expected in SHARES.items():
        for room in (lineup, encoders):
            monkeypatch.setattr(room, "usable_cores", lambda cores=cores: cores)
        alone = make_plan(msgspec.structs.replace(config, models=(encoder,)), {})
        beside = make_plan(msgspec.structs.replace(config, models=(two, told, engine)), {})
        (one,), (of_two, given) = threads_of_encoders(alone), threads_of_encoders(beside)
        assert (one, of_two, beside.specs[0].engine.threads, given) == (*expected, 5)
