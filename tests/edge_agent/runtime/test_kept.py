"""Caches of ended sequences on a tiny llama: what is reused gives the logits of the plain run, for its caller alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_agent.runtime.kept import LEAST_TOKENS, KeptCaches
from edge_agent.runtime.onnx.runtime import open_onnx
from edge_agent.runtime.packed import PackedRuntime
from edge_agent.runtime.protocol import RuntimeRequest, StepInput
from hardware_profiles.loader import RuntimeOptions
from tests.edge_agent.runtime import test_tensorrt_runtime as fake_tensorrt
from tests.edge_agent.runtime.test_poison import poison
from tests.support.tiny_llama import Sizes, run_plain, write_artifact

SIZES = Sizes()
CONTEXT = 256
ACTIONS = ["open", "open", "keep", "keep", "close", "step"]
tensorrt_artifact = fake_tensorrt.artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("tiny") / "tiny-int8", SIZES, prefix=(1,))


def opened(artifact: Path, slots: int) -> PackedRuntime:
    options = RuntimeOptions(intra_op_threads=1)
    return open_onnx(RuntimeRequest(artifact, options, slots=slots, context_tokens=CONTEXT, chunk_tokens=128))


@pytest.fixture
def runtime(artifact: Path) -> Iterator[PackedRuntime]:
    loaded = opened(artifact, slots=3)
    yield loaded
    loaded.close()


def ids_of(seed: int, count: int) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, SIZES.vocab, size=count - 1).tolist()]


def plain(artifact: Path, ids: list[int]) -> np.ndarray:
    return run_plain(artifact / "model.onnx", SIZES, ids)["logits"][0][-1]


def served(runtime: PackedRuntime, ids: list[int], caller: str = "a", decoded: int = 5) -> tuple[int, np.ndarray]:
    """Feed a prompt and some tokens after it one by one, and let the sequence go; ids found, and the last logits."""
    sequence, cached = runtime.open(ids[: len(ids) - decoded], caller)
    logits = runtime.forward([StepInput(sequence, ids[cached : len(ids) - decoded])])
    for token in ids[len(ids) - decoded :]:
        logits = runtime.forward([StepInput(sequence, [token])])
    last = logits[0].copy()
    runtime.close_sequence(sequence, keep=True)
    return cached, last


def test_the_next_turn_begins_where_the_last_one_ended(runtime: PackedRuntime, artifact: Path) -> None:
    chat = ids_of(3, 200)
    assert served(runtime, chat[:60])[0] == 1  # the model's own prefix
    for end, found in ((100, 60), (150, 100), (200, 150)):
        cached, logits = served(runtime, chat[:end])
        assert cached == found
        np.testing.assert_allclose(logits, plain(artifact, chat[:end]), atol=1e-4)
    assert runtime.kv_bytes == 200 * runtime.facts.kv_bytes_per_token  # one chat is kept once


def test_exact_reuse_takes_whole_chunks_and_gives_the_same_bits(artifact: Path) -> None:
    """What an answer added token by token is computed again, in the chunks that a run without any cache has."""

    def run(runtime: PackedRuntime, ids: list[int], decoded: int) -> tuple[int, np.ndarray, np.ndarray]:
        end = len(ids) - decoded
        sequence, cached = runtime.open(ids[:end], "a", exact=True)
        for start in range(cached, end, 32):
            logits = runtime.forward([StepInput(sequence, ids[start : min(start + 32, end)])]).copy()
        for token in ids[end:]:
            logits = runtime.forward([StepInput(sequence, [token])]).copy()
        row = runtime._row(sequence)
        kv = runtime._pack.past(row, 1)[:, :, :, : len(ids)].copy()
        runtime.close_sequence(sequence, keep=True)
        return cached, logits, kv

    options = RuntimeOptions(intra_op_threads=1)
    request = RuntimeRequest(artifact, options, slots=2, context_tokens=CONTEXT, chunk_tokens=32)
    chat = ids_of(13, 230)
    kept = open_onnx(request)
    for end, found in ((110, 1), (160, 97), (161, 129), (230, 129)):
        fresh = open_onnx(request)
        _, expected_logits, expected_kv = run(fresh, chat[:end], 8)
        cached, logits, kv = run(kept, chat[:end], 8)
        assert cached == found
        np.testing.assert_array_equal(kv, expected_kv)
        np.testing.assert_array_equal(logits, expected_logits)
        fresh.close()
    assert kept.open([*chat, 5], "a")[1] == 230  # who does not need the same bits gets all
    kept.close()


def test_a_chat_is_kept_for_its_caller_alone(runtime: PackedRuntime) -> None:
    chat = ids_of(4, 120)
    served(runtime, chat[:80], "a")
    assert served(runtime, chat, "b")[0] == 1
    assert served(runtime, chat, "")[0] == 1
    assert served(runtime, chat, "a")[0] == 80


def test_a_shared_beginning_serves_many_and_stays(runtime: PackedRuntime, artifact: Path) -> None:
    system = ids_of(5, 70)
    first, second = [*system, 4, *ids_of(6, 39)], [*system, 5, *ids_of(7, 39)]
    served(runtime, first)
    cached, logits = served(runtime, second)
    assert cached == 70
    np.testing.assert_allclose(logits, plain(artifact, second), atol=1e-4)
    for chat in (first, second):
        assert served(runtime, [*chat, *ids_of(8, 20)])[0] == 110


def test_the_last_token_of_a_prompt_is_always_computed(runtime: PackedRuntime, artifact: Path) -> None:
    chat = ids_of(9, 60)
    served(runtime, chat)
    sequence, cached = runtime.open(chat, "a")
    assert cached == 59
    np.testing.assert_allclose(runtime.forward([StepInput(sequence, chat[59:])])[0], plain(artifact, chat), atol=1e-4)


def test_what_is_kept_refuses_nobody_and_the_oldest_goes_first(runtime: PackedRuntime, artifact: Path) -> None:
    chats = [ids_of(20 + number, 50) for number in range(4)]
    for chat in chats:
        served(runtime, chat)
    sequences = [runtime.open(ids_of(30 + number, 20), "b")[0] for number in range(3)]  # all slots, at once
    with pytest.raises(RuntimeError, match="KV slots"):
        runtime.open([5, 6, 7], "b")
    for sequence in sequences:
        runtime.close_sequence(sequence)
    for chat in chats[:3]:
        served(runtime, chat)
    served(runtime, chats[3])
    assert [served(runtime, [*chat, 5, 6, 7, 8, 9, 10])[0] for chat in (chats[3], chats[2], chats[1])] == [50, 50, 50]
    assert served(runtime, [*chats[0], 5, 6, 7, 8, 9, 10])[0] == 1


def test_trimming_keeps_the_newest(runtime: PackedRuntime) -> None:
    chats = [ids_of(40 + number, 50) for number in range(3)]
    for chat in chats:
        served(runtime, chat)
    runtime.trim_kept(1)
    assert [runtime.open([*chat, 7], "a")[1] for chat in reversed(chats)] == [50, 1, 1]
    runtime.trim_kept(0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30], ids=["nan", "inf", "huge"])
def test_a_poisoned_sequence_is_never_kept_and_takes_all_that_is_along(artifact: Path, value: float) -> None:
    runtime = opened(artifact, slots=3)
    well, sick = ids_of(50, 60), ids_of(51, 60)
    served(runtime, well)
    sequence, cached = runtime.open(sick, "a")
    poison(runtime, 0, value)
    assert not np.isfinite(runtime.forward([StepInput(sequence, sick[cached:])])).all()
    runtime.close_sequence(sequence, keep=True)
    for chat in (sick, well):
        sequence, cached = runtime.open([*chat, 5], "a")
        assert cached == 1
        logits = runtime.forward([StepInput(sequence, [*chat, 5][cached:])])
        np.testing.assert_allclose(logits[0], plain(artifact, [*chat, 5]), atol=1e-4)
    runtime.close()


def test_a_shared_runtime_on_memory_of_its_own_keeps_as_well(tensorrt_artifact: Path) -> None:
    """TensorRT reads one allocation that CPU and GPU share; what is parked lies in the same one."""
    runtime = fake_tensorrt.opened(tensorrt_artifact)
    chat = ids_of(60, 150)
    served(runtime, chat[:90])
    other, cached = runtime.open(ids_of(61, 40), "b")
    runtime.forward([StepInput(other, ids_of(61, 40)[cached:])])
    found, logits = served(runtime, chat)
    assert found == 90
    expected = run_plain(tensorrt_artifact / "model.onnx", fake_tensorrt.SIZES, chat)["logits"][0][-1]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    runtime.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.integers(1, 60)),
        max_size=40,
    )
)
def test_chats_in_any_order_stay_right_and_within_the_plan(artifact: Path, actions: list[tuple[str, int, int]]) -> None:
    runtime = opened(artifact, slots=2)
    limit_bytes = 2 * CONTEXT * runtime.facts.kv_bytes_per_token
    chats = [ids_of(70 + number % 2, 100 + 20 * number) for number in range(6)]  # three share a beginning, each
    running: dict[int, list[int]] = {}
    for action, pick, size in actions:
        names = list(running)
        if action == "open" and len(running) < 2:
            prompt = chats[pick][: min(len(chats[pick]), 20 + 2 * size)]
            sequence, cached = runtime.open(prompt, "ab"[pick % 2])
            logits = runtime.forward([StepInput(sequence, prompt[cached:])])
            np.testing.assert_allclose(logits[0], plain(artifact, prompt), atol=1e-4)
            running[sequence] = list(prompt)
        elif names and action in {"keep", "close"}:
            name = names[pick % len(names)]
            del running[name]
            runtime.close_sequence(name, keep=action == "keep")
        elif names and action == "step":
            logits = runtime.forward([StepInput(name, [3 + size % 9]) for name in names])
            for name, row in zip(names, logits, strict=True):
                running[name].append(3 + size % 9)
                np.testing.assert_allclose(row, plain(artifact, running[name]), atol=1e-4)
        assert runtime.kv_bytes <= limit_bytes
    runtime.close()
    assert runtime.kv_bytes == 0


def test_a_beginning_that_is_not_worth_it_is_not_used(runtime: PackedRuntime) -> None:
    chat = ids_of(90, 60)
    served(runtime, chat)
    assert runtime.open([*chat[: LEAST_TOKENS - 1], 4, 5, 6], "a")[1] == 1
    assert runtime.open([*chat[:LEAST_TOKENS], 4, 5, 6], "a")[1] == LEAST_TOKENS
    assert KeptCaches().longest("a", chat) is None


def test_no_memory_for_parking_loses_the_cache_and_nothing_else(
    runtime: PackedRuntime, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ids_of(91, 60)

    def full(*_: object) -> Callable[[], None]:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(runtime._pack, "park", full)
        served(runtime, chat)
    cached, logits = served(runtime, [*chat, 5, 6, 7, 8, 9, 10])
    assert cached == 1
    np.testing.assert_allclose(logits, plain(artifact, [*chat, 5, 6, 7, 8, 9, 10]), atol=1e-4)
