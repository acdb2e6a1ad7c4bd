"""SmolLM2-135M in the engine against transformers: logits, tensor parallel, greedy text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cloud_tier.engine.messages import Segment
from models.formats.weights import open_weights
from models.store.store import ModelStore
from models.text.tokenizer import Tokenizer
from tests.support.engine_models import Bench, small
from tests.support.engine_parallel import on_one, on_ranks

pytestmark = pytest.mark.real_model

QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "Name three primary colours.",
    "How many legs does a spider have?",
    "Translate 'good morning' into Spanish.",
    "What is 7 times 8?",
    "Explain gravity in one sentence.",
    "Write a haiku about the sea.",
    "Give me a recipe for pancakes.",
    "What does CPU stand for?",
    "Which planet is the largest?",
    "Why is the sky blue?",
    "Tell me a joke about cats.",
    "List the days of the week.",
    "What is photosynthesis?",
    "Summarise the plot of Romeo and Juliet.",
    "Write a Python function that adds two numbers.",
    "Is water wet?",
    "What is the boiling point of water in Celsius?",
    "Invent a name for a bakery.",
    "Correct this: He go to school yesterday.",
    "Ist Berlin die Hauptstadt von Deutschland?",
)
DOCUMENT = "The harbour town woke slowly, and the fishermen counted their nets. " * 20


@pytest.fixture(scope="module")
def weights(models_root: Path) -> Path:
    return ModelStore(models_root).source_path("smollm2-135m")


@pytest.fixture(scope="module")
def tokenizer(weights: Path) -> Tokenizer:
    return Tokenizer.from_gguf(weights)


@pytest.fixture(scope="module")
def reference(weights: Path) -> Any:
    source = open_weights(weights)
    shape = source.config
    config = transformers.LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_context_tokens,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = [name for name in model.state_dict() if name != "lm_head.weight"]
    tensors = {name: torch.from_numpy(source.tensor(name).copy()) for name in names}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def _chat(tokenizer: Tokenizer, question: str) -> list[int]:
    return tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def _expected(reference: Any, tokens: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([tokens + answer]), use_cache=False).logits
    return logits[0, len(tokens) - 1 : -1]


def test_logits_equal_transformers(weights: Path, tokenizer: Tokenizer, reference: Any) -> None:
    bench = Bench(small(weights, token_budget=128, max_context_tokens=512))
    tokens = _chat(tokenizer, DOCUMENT)
    bench.add(0, tokens, 33)
    answer = bench.run()[0]
    assert len(answer) == 33
    difference = (torch.cat(bench.logits) - _expected(reference, tokens, answer)).abs().max().item()
    assert difference <= 1e-3


@pytest.mark.parametrize("ranks", [2, 3])
def test_logits_of_several_ranks_equal_one(weights: Path, tokenizer: Tokenizer, ranks: int, tmp_path: Path) -> None:
    tokens = _chat(tokenizer, QUESTIONS[0] + QUESTIONS[15] * 2)
    blocks = [(0, 6)]
    steps = [[Segment(0, tokens, blocks, draws=True)]]
    steps += [[Segment(len(tokens) + n, [1000 + 37 * n], blocks, draws=True)] for n in range(32)]
    config = small(weights, tensor_parallel=ranks)
    # The prompt is summed by gloo and the decode steps by the mesh, as in the engine.
    assert (on_ranks(config, steps, tmp_path, mesh=True) - on_one(config, steps)).abs().max().item() <= 1e-4


def test_greedy_text_equals_transformers(weights: Path, tokenizer: Tokenizer, reference: Any) -> None:
    """Equal greedy texts are argmaxes that agree after every common prefix; a tie must show itself as one."""
    bench = Bench(small(weights, max_running=22, token_budget=128, kv_cache_tokens=4096, max_context_tokens=512))
    prompts = [_chat(tokenizer, question) for question in QUESTIONS]
    for handle, tokens in enumerate(prompts):
        bench.add(handle, tokens, 24, eos_ids=tokenizer.eos_ids)
    answers = bench.run()
    assert "Paris" in tokenizer.decode(answers[0])
    for handle, tokens in enumerate(prompts):
        answer = answers[handle]
        logits = _expected(reference, tokens, answer)
        for place in (logits.argmax(-1) != torch.tensor(answer)).nonzero().flatten().tolist():
            best, second = logits[place].topk(2).values.tolist()
            chosen = logits[place, answer[place]].item()
            assert best - chosen <= 1e-4, f"{QUESTIONS[handle]!r} differs at token {place} by {best - chosen}, no tie"
            assert chosen == second
        if len(answer) < 24:
            with torch.no_grad():
                end = reference(torch.tensor([tokens + answer]), use_cache=False).logits[0, -1].argmax().item()
            assert end in tokenizer.eos_ids
