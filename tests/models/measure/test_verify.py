"""Verification measures what it says: perplexity by its definition, loops and lost facts found, budgets enforced."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue.families import Budget
from models.graph.decoder import Decoder, greedy
from models.graph.fused import fuse
from models.graph.gate import GraphFacts
from models.measure.corpus import Chat
from models.measure.quality import Comparison, HeldOut, compare, faults, loops, score
from models.measure.speed import CASES, Case, Rate, race
from models.measure.verify import Measured, VerifyOptions, VerifyReport, overruns, render, verify
from models.store.store import ModelStore
from router.base.errors import ArtifactError, InvalidRequest
from tests.support.tiny_models import TinyWeights, tiny_config, written

IDS = [1, 17, 5, 88, 3, 42, 42, 9, 60, 2, 31]
BUDGET = Budget(max_perplexity_increase_pct=2.0, min_top1_agreement_pct=91.0, min_speedup=1.8, min_speedup_batch4=1.6)


class Words:
    """A tokenizer of numbers: token 7 is the word `7`."""

    def decode(self, ids: tuple[int, ...]) -> str:
        return " ".join(map(str, ids))


def test_scores_follow_their_definitions(tmp_path: Path) -> None:
    model = fuse(TinyWeights(tiny_config()))
    runner = written(model, tmp_path)
    chat = Chat("a question", IDS[:6], IDS[6:])
    seen = score(runner, HeldOut([IDS], [chat], spoken=1, answer_tokens=5), frozenset())
    decoder = Decoder(model)
    logits = decoder(decoder.fresh(IDS)).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[1:-1], torch.tensor(IDS[2:]))
    assert seen.perplexity == pytest.approx(float(loss.exp()), rel=1e-3)
    np.testing.assert_array_equal(seen.text_choices, logits[1:-1].argmax(-1))
    np.testing.assert_array_equal(seen.chat_choices, logits[5:-1].argmax(-1))
    assert list(seen.answers[0]) == greedy(decoder, chat.prompt_ids, 5, frozenset())


def test_a_model_agrees_with_itself(tmp_path: Path) -> None:
    data = HeldOut([IDS], [Chat("a question", IDS[:6], IDS[6:])], spoken=1, answer_tokens=5)
    seen = score(written(fuse(TinyWeights(tiny_config())), tmp_path), data, frozenset())
    same = compare(seen, seen, data, Words())  # type: ignore[arg-type]
    assert (same.perplexity_increase_pct, same.text_agreement_pct, same.chat_agreement_pct) == (0, 100, 100)
    assert same.same_prefix_pct == 100
    assert same.faults == ()


@given(st.lists(st.integers(0, 5), max_size=8), st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_four_turns_of_a_cycle_are_a_loop(begin: list[int], cycle: list[int]) -> None:
    assert loops(begin + cycle * 4)


def test_what_does_not_repeat_to_the_end_is_no_loop() -> None:
    assert not loops([])
    assert not loops([1, 2, 3])
    assert not loops([7] * 3)
    assert not loops([1, 2, 1, 2, 1, 2, 1, 2, 3])


def test_faults_are_loops_silences_and_lost_facts_that_only_the_variant_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.measure.quality.FACTS", {"which number?": "42"})
    chats = [Chat(question, [1], [2]) for question in ("which number?", "loop?", "silent?")]
    said = [(3, 4), (5,) * 8, ()]
    expected = [(4, 42), (5, 6), (1,)]
    found = faults(chats, said, expected, Words())  # type: ignore[arg-type]
    assert [line.split(":")[0] for line in found] == ["'which number?'", "'silent?'", "'loop?'"]
    assert "lost '42'" in found[0]


def test_a_reference_that_loops_excuses_as_many_new_loops() -> None:
    chats = [Chat(question, [1], [2]) for question in ("first?", "second?", "third?")]
    loop, calm = (5,) * 8, (5, 6)
    assert faults(chats, [calm, loop, calm], [loop, calm, calm], Words()) == []  # type: ignore[arg-type]
    found = faults(chats, [calm, loop, loop], [loop, calm, calm], Words())  # type: ignore[arg-type]
    assert [line.split(":")[0] for line in found] == ["'second?'", "'third?'"]


def _report(
    perplexity_pct: float = 1.0,
    text: float = 95.0,
    chat: float = 95.0,
    gain: float = 2.0,
    bare: tuple[float, float] | None = None,
) -> VerifyReport:
    comparison = Comparison(17.2, 17.0, perplexity_pct, text, chat, 50.0, 0, 0, (), *(bare or (None, None)))
    rates = {name: tuple(Rate(speed, speed, speed) for _ in CASES) for name, speed in (("v", 50 * gain), ("r", 50.0))}
    measured = {name: Measured(1000, rates[name]) for name in ("v", "r")}
    graph = GraphFacts(10, 4, 4, 4, 0)
    return VerifyReport("v", "r", comparison, 0.98, graph, measured, CASES, 1, 100, ())


@pytest.mark.parametrize(
    ("report", "complaint"),
    [
        (_report(), None),
        (_report(perplexity_pct=2.1), "perplexity"),
        (_report(text=90.9), "top-1 on text"),
        (_report(chat=90.9), "top-1 on chat"),
        (_report(bare=(1.9, 88.1)), None),
        (_report(bare=(349.0, 95.0)), "perplexity on text that begins anywhere"),
        (_report(bare=(1.0, 87.9)), "top-1 on text that begins anywhere"),
        (_report(gain=1.7), "decode, batch 1: 1.70×"),
        (_report(gain=1.5), "decode, batch 4: 1.50×"),
    ],
)
def test_each_part_of_the_budget_is_enforced(report: VerifyReport, complaint: str | None) -> None:
    found = overruns(report, BUDGET)
    assert any(complaint in line for line in found) if complaint else found == []


def test_speed_is_not_judged_where_it_was_not_timed() -> None:
    timed = _report(gain=1.0)
    untimed = replace(timed, measured={name: replace(one, rates=()) for name, one in timed.measured.items()})
    assert overruns(untimed, BUDGET) == []
    assert overruns(timed, None) == []


def test_the_report_is_json_and_a_table() -> None:
    report = _report()
    tree = json.loads(report.to_json())
    assert tree["passed"] is True
    assert tree["comparison"]["perplexity_increase_pct"] == 1.0
    assert not replace(report, failures=("slow",)).passed
    assert render(report).row_count == 11


def test_the_race_times_all_in_every_case(tmp_path: Path) -> None:
    runner = written(fuse(TinyWeights(tiny_config())), tmp_path)
    cases = (Case("decode", 2, 5, 1), Case("prefill", 1, 1, 6))
    rates = race({"one": runner, "other": runner}, cases, turns=2)
    assert list(rates) == ["one", "other"]
    assert all(len(seen) == 2 and all(rate.tokens_per_s > 0 for rate in seen) for seen in rates.values())


def test_only_int8_artifacts_are_verified(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="verify compares INT8"):
        verify("smollm2-135m-fp32", ModelStore(tmp_path))
    with pytest.raises(ArtifactError, match="--prepare"):
        verify("smollm2-135m-int8", ModelStore(tmp_path))


@pytest.mark.real_model
def test_the_int8_rung_keeps_its_budget_on_a_part_of_the_data(models_root: Path) -> None:
    options = VerifyOptions(threads=1, chunks=2, chats=16, spoken=1, speed=False, memory=False)
    report = verify("smollm2-135m-int8", ModelStore(models_root), options=options)
    assert report.comparison.faults == ()
    assert report.comparison.chat_agreement_pct > 91
    assert report.comparison.text_agreement_pct > 90
    assert report.comparison.perplexity_increase_pct < 3
