"""The engine asks an undecided constraint about the token that would come without it, whatever the sampling is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cloud_tier.engine import drawing
from cloud_tier.engine.constrained import Guided
from cloud_tier.engine.drawing import Drawn
from cloud_tier.engine.sampler import SamplerState
from models.text.guide import Guide
from router.values.sampling import SamplingParams
from tests.models.text.test_call_or_answer import EITHER, GRAMMARS, TOKENIZER, token

CPU = torch.device("cpu")


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.1}])
@pytest.mark.parametrize(("own", "begins"), [("the", "{"), ("<", "<")])
def test_words_become_an_answer_and_a_call_stays_one(params: dict[str, float], own: str, begins: str) -> None:
    logits = torch.full((1, TOKENIZER.vocab_size), -30.0)
    logits[0, token("{")], logits[0, token("<")], logits[0, token(own)] = 0.0, 5.0, 20.0
    sampling = SamplingParams(seed=1, **params)  # type: ignore[arg-type]
    state = SamplerState.create(sampling, (), TOKENIZER.vocab_size, CPU)
    guide = Guide(GRAMMARS.matcher(EITHER), TOKENIZER.vocab_size, proposes=state.proposes)
    sequence: Any = SimpleNamespace(handle=1, sampler=state, guide=guide)
    guided = Guided(CPU)
    guided.begin([sequence])
    guided.wait([sequence], 60)
    assert drawing._choose(logits, [sequence], Drawn(), guided, 60) == {1: token(begins)}
