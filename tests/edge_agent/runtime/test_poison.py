"""A row of the KV cache that is not finite: it ends its own request, and poisons no other, now or later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.runtime.kv_pack import KvPack
from edge_agent.runtime.onnx.runtime import open_onnx
from edge_agent.runtime.packed import PackedRuntime
from edge_agent.runtime.protocol import RuntimeRequest, StepInput
from hardware_profiles.loader import RuntimeOptions
from tests.edge_agent.runtime.test_kv_pack import SHAPE, block
from tests.support.tiny_llama import Sizes, run_plain, write_artifact

SIZES = Sizes()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("tiny") / "tiny-int8", SIZES, prefix=(1,))


def opened(artifact: Path, slots: int = 2) -> PackedRuntime:
    options = RuntimeOptions(intra_op_threads=1)
    return open_onnx(RuntimeRequest(artifact, options, slots=slots, context_tokens=256, chunk_tokens=128))


def poison(runtime: PackedRuntime, row: int, value: float) -> None:
    """Let the executor return `value` as the new keys and values of one row, once."""
    bind = runtime._bind

    def bound(key, *, every):
        step = bind(key, every=every)
        run = step.run

        def poisoned() -> None:
            run()
            step.new[:, row] = value
            runtime._bind = bind
            runtime._decode = None

        step.run = poisoned
        return step

    runtime._decode = None
    runtime._bind = bound


def plain(artifact: Path, ids: list[int]) -> np.ndarray:
    return run_plain(artifact / "model.onnx", SIZES, ids)["logits"][0]


LONG = [1, *(3 + n % 40 for n in range(90))]
SHORT = [1, 7, 8, 9]


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30], ids=["nan", "inf", "huge"])
def test_the_request_after_a_poisoned_one_is_answered_as_ever(artifact: Path, value: float) -> None:
    runtime = opened(artifact)
    sick, cached = runtime.open(LONG)
    poison(runtime, 0, value)
    logits = runtime.forward([StepInput(sick, LONG[cached:])])
    assert not np.isfinite(logits).all()  # so that the loop ends it
    runtime.close_sequence(sick)
    long, cached = runtime.open(LONG)  # a longer row beside it: the short one's padding is the poisoned stretch
    np.testing.assert_allclose(
        runtime.forward([StepInput(long, LONG[cached:])])[0], plain(artifact, LONG)[-1], atol=1e-4
    )
    short, cached = runtime.open(SHORT)
    np.testing.assert_allclose(
        runtime.forward([StepInput(short, SHORT[cached:])])[0], plain(artifact, SHORT)[-1], atol=1e-4
    )
    both = runtime.forward([StepInput(long, [5]), StepInput(short, [5])])
    np.testing.assert_allclose(both[0], plain(artifact, [*LONG, 5])[-1], atol=1e-4)
    np.testing.assert_allclose(both[1], plain(artifact, [*SHORT, 5])[-1], atol=1e-4)
    runtime.close()


def test_a_poisoned_row_of_a_batch_leaves_its_neighbour_alone(artifact: Path) -> None:
    runtime = opened(artifact)
    well, sick = runtime.open(SHORT)[0], runtime.open(LONG)[0]
    runtime.forward([StepInput(well, SHORT[1:])])
    runtime.forward([StepInput(sick, LONG[1:])])
    poison(runtime, 1, np.nan)
    logits = runtime.forward([StepInput(well, [5]), StepInput(sick, [5])])
    np.testing.assert_allclose(logits[0], plain(artifact, [*SHORT, 5])[-1], atol=1e-4)
    assert not np.isfinite(logits[1]).all()
    runtime.close_sequence(sick)
    np.testing.assert_allclose(
        runtime.forward([StepInput(well, [6])])[0], plain(artifact, [*SHORT, 5, 6])[-1], atol=1e-4
    )
    runtime.close()


def test_a_poisoned_chunk_without_logits_fails_its_step(artifact: Path) -> None:
    runtime = opened(artifact)
    sick, cached = runtime.open(LONG)
    poison(runtime, 0, np.nan)
    with pytest.raises(ArithmeticError, match="not finite"):
        runtime.forward([StepInput(sick, LONG[cached:40], want_logits=False)])
    runtime.close_sequence(sick)
    again, cached = runtime.open(LONG)
    np.testing.assert_allclose(
        runtime.forward([StepInput(again, LONG[cached:])])[0], plain(artifact, LONG)[-1], atol=1e-4
    )
    runtime.close()


def test_memory_that_went_bad_by_itself_is_scrubbed_when_it_shows(artifact: Path) -> None:
    """A bit that flipped in a row's leftovers: the request that meets it fails, the next one does not."""
    runtime = opened(artifact)
    sequences = [runtime.open(LONG)[0], runtime.open(SHORT)[0]]
    for sequence, ids in zip(sequences, (LONG, SHORT), strict=True):
        runtime.forward([StepInput(sequence, ids[1:])])
    runtime._pack._view[:, 1, :, 60:] = np.nan
    logits = runtime.forward([StepInput(sequences[0], [5]), StepInput(sequences[1], [5])])
    np.testing.assert_allclose(logits[0], plain(artifact, [*LONG, 5])[-1], atol=1e-4)
    assert not np.isfinite(logits[1]).all()
    runtime.close_sequence(sequences[1])
    again, cached = runtime.open(SHORT)
    runtime.forward([StepInput(again, SHORT[cached:])])
    both = runtime.forward([StepInput(sequences[0], [6]), StepInput(again, [5])])
    np.testing.assert_allclose(both[0], plain(artifact, [*LONG, 5, 6])[-1], atol=1e-4)
    np.testing.assert_allclose(both[1], plain(artifact, [*SHORT, 5])[-1], atol=1e-4)
    runtime.close()


def test_a_growth_that_finds_no_memory_leaves_every_row_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = KvPack(SHAPE)
    for row in range(2):
        pack.append(pack.add_row(), block(50, 100.0 * row))
    with monkeypatch.context() as patch:
        calls: list[int] = []
        empty = np.empty

        def scarce(*args, **more):
            calls.append(1)
            raise MemoryError

        patch.setattr("edge_agent.runtime.kv_pack.np.empty", scarce)
        with pytest.raises(MemoryError):
            pack.reserve(300)
        assert calls
        assert empty is not np.empty
    for row in range(2):
        np.testing.assert_array_equal(pack.past(row, 1)[:, :, :, :50], block(50, 100.0 * row))
