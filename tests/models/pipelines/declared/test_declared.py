"""Declared pipelines: how stages are wired, what is refused before anything runs, and what runs."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.pipelines.declared.assembly import assemble, check_ladders, plan_of
from models.pipelines.declared.contract import Contract
from models.pipelines.declared.rows import Rows, array_of, padded, tensor_of
from models.pipelines.declared.settings import PipelineSettings, check_pipelines
from models.pipelines.kinds.registry import Supplies
from models.pipelines.pipeline import Pipeline
from router.base.clock import MonotonicClock
from router.base.errors import ArtifactError, ConfigError, InvalidRequest, OverspillError, RequestFailed, Unavailable
from router.values.task import EmbedCall, TensorCall
from router.values.tensors import NamedTensor, Signature, Tensors, TensorSpec
from tests.support.waiting import PATIENCE_S, until

X = {"name": "x", "datatype": "FP32", "shape": [-1]}
Y = {"name": "y", "datatype": "FP32", "shape": [-1]}
OWN = "tests.support.stages"


def own(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "use": f"{OWN}:{name}", "inputs": [X], "outputs": [Y], **more}


def pipeline(*stages: dict[str, Any], **more: Any) -> PipelineSettings:
    return msgspec.convert({"name": "test", "stages": list(stages), **more}, PipelineSettings)


def nothing(variant: str) -> tuple[Path, Contract | None]:
    raise ArtifactError(f"{variant} was not made here")


SUPPLIES = Supplies(nothing)


@asynccontextmanager
async def running(settings: PipelineSettings) -> AsyncIterator[tuple[Pipeline, Rows]]:
    checked = assemble(settings, SUPPLIES)
    opened = Pipeline(plan_of(checked), MonotonicClock())
    await opened.open()
    try:
        yield opened, Rows(checked.signature)
    finally:
        await opened.close()


def call(*rows: list[float]) -> TensorCall:
    array = np.array(rows, "<f4")
    return TensorCall((NamedTensor("x", "FP32", array.shape, array.tobytes()),))


async def answer(opened: Pipeline, rows: Rows, asked: TensorCall) -> dict[str, Any]:
    values = rows.values(asked)
    done = await opened.run(values, priority=0, due_s=math.inf, cost=asked.rows)
    output, count = rows.output(done.results)
    assert count == asked.rows
    return {tensor.name: array_of(tensor) for tensor in output.tensors}


async def test_functions_in_a_row() -> None:
    second = own("doubled", reads={"x": "y"}, writes={"y": "z"}) | {"name": "again"}
    async with running(pipeline(own("doubled"), second, outputs=["z", "x"])) as (opened, rows):
        found = await answer(opened, rows, call([1.0, 2.0], [3.0, 4.0]))
    assert found["z"].tolist() == [[4, 8], [12, 16]]
    assert found["x"].tolist() == [[1, 2], [3, 4]]  # what callers sent is a tensor of the pipeline too
    assert list(found) == ["z", "x"]


@pytest.mark.process
async def test_a_class_is_made_with_its_options_in_a_process_of_its_own() -> None:
    pid = {"name": "pid", "datatype": "INT64", "shape": [1]}
    stage = own("Scaled", options={"factor": 3}, pool="processes") | {"name": "scaled", "outputs": [Y, pid]}
    async with running(pipeline(stage)) as (opened, rows):
        found = await answer(opened, rows, call([1.0, 2.0]))
    assert found["y"].tolist() == [[3, 6]]
    assert found["pid"][0, 0] != os.getpid()


async def test_one_poisoned_input_does_not_fail_its_batch() -> None:
    stage = own("poisoned", max_batch=32, max_wait_ms=300)
    async with running(pipeline(stage)) as (opened, rows):
        asked = [answer(opened, rows, call([float(number)])) for number in range(10, 16)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert opened.stages[0].counters.isolated == 1
    assert isinstance(found[3], RequestFailed)
    assert [one["y"][0, 0] for one in found if isinstance(one, dict)] == [20, 22, 24, 28, 30]


async def test_a_slow_stage_refuses_at_the_door_and_not_between() -> None:
    stages = own("doubled"), own("slow", reads={"x": "y"}, writes={"y": "z"}, queue_inputs=4)
    async with running(pipeline(*stages)) as (opened, rows):
        first = asyncio.ensure_future(answer(opened, rows, call(*[[float(n)] for n in range(12)])))
        await until(lambda: opened.stages[1].waiting >= 4)
        with pytest.raises(Unavailable, match="inputs wait at stage slow, the limit is 4"):
            await answer(opened, rows, call([1.0]))
        assert len((await first)["z"]) == 12  # what is inside goes through


@pytest.mark.parametrize("seconds", [math.inf, 1e9, -1.0])
def test_a_time_that_no_process_can_be_waited_for_is_refused(seconds: float) -> None:
    """Beyond some weeks the system takes none: every batch failed."""
    with pytest.raises(msgspec.ValidationError, match="timeout_s"):
        pipeline(own("doubled", pool="processes", timeout_s=seconds))


async def test_a_stage_that_breaks_its_contract_says_so() -> None:
    async with running(pipeline(own("wrong_type"))) as (opened, rows):
        with pytest.raises(RequestFailed, match=r"`y` is float64\[1\], its contract says FP32\[-1\]"):
            await answer(opened, rows, call([1.0]))


async def test_a_stage_whose_bytes_are_none_says_so() -> None:
    """An array of objects may hold anything: what has no length ended the worker, and the pipeline stood still."""
    names = {"name": "names", "datatype": "BYTES", "shape": [1]}
    async with running(pipeline(own("named", outputs=[names]))) as (opened, rows):
        with pytest.raises(RequestFailed, match="`names` holds NoneType, BYTES are Python `bytes`"):
            await asyncio.wait_for(answer(opened, rows, call([-1.0])), PATIENCE_S)
        with pytest.raises(RequestFailed, match="`names` holds str, BYTES are Python `bytes`"):
            await asyncio.wait_for(answer(opened, rows, call([0.0])), PATIENCE_S)
        assert (await answer(opened, rows, call([1.0])))["names"][0] == b"one"


async def test_open_dimensions_are_grouped_or_padded() -> None:
    for buckets in ((), (4,)):
        stage = own("doubled", max_batch=8, max_wait_ms=300, buckets=list(buckets))
        async with running(pipeline(stage)) as (opened, rows):
            asked = [answer(opened, rows, call([1.0] * length)) for length in (2, 3)]
            short, long = await asyncio.gather(*asked)
            assert opened.stages[0].counters.batches == 1
        assert short["y"].shape == ((1, 4) if buckets else (1, 2))
        assert long["y"][0, :3].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        ([{"name": "a", "use": "decode-picture"}], "use = `decode-picture` is no built-in stage: take one of"),
        ([{"name": "a", "use": "resize", "options": {"width": 4}}], "options: .*`height`.* knows: width, height"),
        ([{"name": "a", "use": "unit", "options": {"size": 4}, "inputs": [X]}], "has inputs and outputs of its own"),
        ([own("doubled") | {"inputs": []}], "says what it takes and gives: write inputs and outputs"),
        ([own("doubled") | {"use": f"{OWN}:tripled"}], "`tests.support.stages` has no `tripled`"),
        ([own("doubled") | {"use": "no_such_module:f"}], "no_such_module cannot be imported: install it, or add its"),
        ([own("doubled", pool="processes") | {"use": "no_such_module:f"}], "no_such_module cannot be imported"),
        ([own("no_arguments")], "must take one argument, a dictionary of arrays"),
        ([own("doubled", options={"a": 1})], "`options` go to a class, and .* is a function"),
        ([own("doubled"), own("slow", reads={"x": "w"})], "reads `w`, which nothing before it writes; there are: x, y"),
        ([own("doubled"), {"name": "u", "use": "unit", "options": {"size": 4}, "reads": {"pooled": "y"}}], None),
        (
            [own("doubled"), {"name": "t", "use": "tokenize", "options": {"tokenizer": "x"}}],
            "x was not made here",
        ),
        ([own("doubled"), {"name": "d", "use": "decode-image", "reads": {"image": "y"}}], "`y` as BYTES.*is FP32"),
        ([own("doubled", reads={"q": "y"})], "`reads` names q; `.*:doubled` has: x"),
        ([{"name": "m", "use": "onnx", "options": {"path": "/x"}}], "this tier runs no ONNX files"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_runs(stages: list[dict[str, Any]], told: str | None) -> None:
    settings = pipeline(*stages)
    if told is None:
        assert assemble(settings, SUPPLIES).signature.outputs[0].shape == (4,)
        return
    with pytest.raises(OverspillError, match=told) as refused:
        assemble(settings, SUPPLIES)
    assert isinstance(refused.value, ArtifactError) or "pipeline `test`" in refused.value.message


def test_a_program_that_leaves_as_it_is_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_program.py").write_text("raise SystemExit(2)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="`a_program:main` fails as it is imported"):
        assemble(pipeline(own("doubled") | {"use": "a_program:main"}), SUPPLIES)


def test_rungs_of_a_family_are_alike() -> None:
    wide = own("doubled") | {"outputs": [Y | {"shape": [4]}]}
    one, other = pipeline(own("doubled"), family="f"), pipeline(wide, family="f")
    check_ladders([assemble(one, SUPPLIES), assemble(one, SUPPLIES)])
    with pytest.raises(ConfigError, match=r"rungs of `f`, and differ .*y FP32\[-1\] and .*y FP32\[4\]"):
        check_ladders([assemble(one, SUPPLIES), assemble(other, SUPPLIES)])


def test_names_and_rungs_are_unique() -> None:
    one = pipeline(own("doubled"), family="f")
    with pytest.raises(ValueError, match="two have the name `test`"):
        check_pipelines((one, one))
    with pytest.raises(ValueError, match="both are rung 0 of `f`"):
        check_pipelines((one, msgspec.structs.replace(one, name="other")))
    with pytest.raises(msgspec.ValidationError, match="two stages of the name doubled"):
        pipeline(own("doubled"), own("doubled"))
    with pytest.raises(msgspec.ValidationError, match="must ascend"):
        pipeline(own("doubled", buckets=[8, 4]))
    with pytest.raises(msgspec.ValidationError, match="unknown field `workers`"):
        pipeline(own("doubled", workers=2))


def test_only_what_is_needed_goes_on() -> None:
    second = own("slow", reads={"x": "y"}, writes={"y": "z"})
    checked = assemble(pipeline(own("doubled"), second), SUPPLIES)
    assert [sorted(stage.keep) for stage in checked.stages] == [[], []]
    checked = assemble(pipeline(own("doubled"), second, outputs=["x", "z"]), SUPPLIES)
    assert [sorted(stage.keep) for stage in checked.stages] == [["x"], ["x"]]


def test_calls_of_another_kind_are_refused() -> None:
    rows = Rows(Signature((TensorSpec("x", "FP32", (2,)),), ()))
    for prompt in (EmbedCall(("a",)), call([1.0]), TensorCall((NamedTensor("z", "FP32", (1, 2), bytes(8)),))):
        with pytest.raises(InvalidRequest):
            rows.values(prompt)


@given(
    st.lists(st.binary(max_size=9), min_size=1, max_size=9),
    st.lists(st.lists(st.floats(width=32, allow_nan=False), max_size=5), min_size=1, max_size=5),
)
def test_tensors_come_back_as_they_went(texts: list[bytes], numbers: list[list[float]]) -> None:
    array = np.empty((len(texts), 1), object)
    array[:, 0] = texts
    told = tensor_of(TensorSpec("t", "BYTES", (1,)), array)
    assert told.shape == (len(texts), 1)
    assert array_of(told)[:, 0].tolist() == texts
    ragged = padded([np.array(row, np.float32) for row in numbers])
    back = array_of(tensor_of(TensorSpec("x", "FP32", (-1,)), ragged))
    assert back.shape == (len(numbers), max(map(len, numbers)))
    for row, given_row in zip(back, numbers, strict=True):
        assert row[: len(given_row)].tolist() == given_row
        assert not row[len(given_row) :].any()


def test_an_answer_is_in_the_order_of_the_signature() -> None:
    rows = Rows(Signature((), (TensorSpec("b", "INT32", (1,)), TensorSpec("a", "INT32", (1,)))))
    output, _ = rows.output([{"a": np.array([1], np.int32), "b": np.array([2], np.int32)}])
    assert isinstance(output, Tensors)
    assert [tensor.name for tensor in output.tensors] == ["b", "a"]
