"""How much of the original a variant kept: perplexity, agreement on the next token, and what it says when it speaks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from models.measure.corpus import Chat
from models.measure.runner import OnnxRunner
from models.text.tokenizer import Tokenizer

_LONGEST_CYCLE, _REPEATS = 24, 4

# A question and a word its answer must hold, if the reference's answer holds it. `quantize` tries another rotation
# where one of the selection set is lost: those are a gate. Those of the test set are evidence.
FACTS = {
    # selection
    "What is the capital of France?": "Paris",
    "What is 12 times 8?": "96",
    "What is DNA?": "genetic",
    # test
    "Who painted the Mona Lisa?": "Leonardo",
    "What is the largest ocean on Earth?": "Pacific",
    "What is the chemical formula of water?": "H2O",
}


@dataclass(frozen=True)
class Scores:
    """One model on the held-out data.

    Attributes:
        perplexity: exp of the mean negative log-likelihood per token of text.
        text_choices, chat_choices: the model's first choice at every scored position of the text and of the answers.
        answers: its own greedy answers, as token ids.
        bare_perplexity, bare_choices: the same of text that does not begin with the model's first token.
    """

    perplexity: float
    text_choices: npt.NDArray[np.int64]
    chat_choices: npt.NDArray[np.int64]
    answers: tuple[tuple[int, ...], ...]
    bare_perplexity: float = math.nan
    bare_choices: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class HeldOut:
    """What quality is measured on.

    Attributes:
        chunks: text, each chunk a sequence of its own.
        chats: prompts with reference answers, scored with the answer given.
        spoken: how many of the chats are also answered freely.
        answer_tokens: longest free answer.
        bare: text that does not begin with the model's first token, as prompts of token ids may; in short pieces, for
            the first token weighs most in them. Empty where no text of the model begins with one.
    """

    chunks: Sequence[Sequence[int]]
    chats: Sequence[Chat]
    spoken: int = 12
    answer_tokens: int = 64
    bare: Sequence[Sequence[int]] = ()


def score(runner: OnnxRunner, data: HeldOut, eos_ids: frozenset[int]) -> Scores:
    """Run one model over all held-out data."""
    perplexity, text_choices = _read(runner, data.chunks)
    bare_perplexity, bare_choices = _read(runner, data.bare)
    chat_choices = []
    for chat in data.chats:
        logits = runner.score([*chat.prompt_ids, *chat.answer_ids])
        chat_choices.append(logits[-len(chat.answer_ids) - 1 : -1].argmax(axis=-1))
    answers = [
        tuple(runner.generate([chat.prompt_ids], data.answer_tokens, eos_ids)[0]) for chat in data.chats[: data.spoken]
    ]
    return Scores(
        perplexity,
        text_choices,
        np.concatenate([np.empty(0, np.int64), *chat_choices]),
        tuple(answers),
        bare_perplexity,
        bare_choices,
    )


def _read(runner: OnnxRunner, texts: Sequence[Sequence[int]]) -> tuple[float, npt.NDArray[np.int64]]:
    """Return the perplexity of a model on some texts, NaN for none, and its first choice at every scored position."""
    loss, tokens, choices = 0.0, 0, [np.empty(0, np.int64)]
    for text in texts:
        logits = runner.score(text)[:-1]
        targets = np.asarray(text)[-len(logits) :]
        loss += float(_losses(logits, targets).sum())
        tokens += len(targets)
        choices.append(logits.argmax(axis=-1))
    return float(np.exp(loss / tokens)) if tokens else math.nan, np.concatenate(choices)


def _losses(logits: npt.NDArray[np.float32], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    highest = logits.max(axis=-1)
    total = np.log(np.exp(logits - highest[:, None]).sum(axis=-1)) + highest
    losses: npt.NDArray[np.float32] = total - np.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return losses


@dataclass(frozen=True)
class Comparison:
    """A variant beside its reference, on the same held-out data.

    Attributes:
        perplexity_increase_pct: of the variant over the reference.
        text_agreement_pct, chat_agreement_pct: positions where both would choose the same token.
        same_prefix_pct: how far into the reference's free answers the variant's are the same, token by token.
        loops, reference_loops: free answers that end in a loop.
        faults: see `faults`.
        bare_increase_pct, bare_agreement_pct: perplexity and agreement on text without the model's first token; None
            where none was scored.
    """

    perplexity: float
    reference_perplexity: float
    perplexity_increase_pct: float
    text_agreement_pct: float
    chat_agreement_pct: float
    same_prefix_pct: float
    loops: int
    reference_loops: int
    faults: tuple[str, ...]
    bare_increase_pct: float | None = None
    bare_agreement_pct: float | None = None


def compare(variant: Scores, reference: Scores, data: HeldOut, tokenizer: Tokenizer) -> Comparison:
    """Relate two `Scores` of the same data."""
    shared = sum(_shared(one, other) for one, other in zip(variant.answers, reference.answers, strict=True))
    total = sum(len(answer) for answer in reference.answers)
    bare = len(data.bare) > 0
    return Comparison(
        perplexity=variant.perplexity,
        reference_perplexity=reference.perplexity,
        perplexity_increase_pct=100 * (variant.perplexity / reference.perplexity - 1),
        text_agreement_pct=_agreement_pct(variant.text_choices, reference.text_choices),
        chat_agreement_pct=_agreement_pct(variant.chat_choices, reference.chat_choices),
        same_prefix_pct=100 * shared / max(total, 1),
        loops=sum(map(loops, variant.answers)),
        reference_loops=sum(map(loops, reference.answers)),
        faults=tuple(faults(data.chats, variant.answers, reference.answers, tokenizer)),
        bare_increase_pct=100 * (variant.bare_perplexity / reference.bare_perplexity - 1) if bare else None,
        bare_agreement_pct=_agreement_pct(variant.bare_choices, reference.bare_choices) if bare else None,
    )


def _agreement_pct(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> float:
    return 100 * float((one == other).mean())


def faults(
    chats: Sequence[Chat],
    answers: Sequence[Sequence[int]],
    expected_answers: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
) -> list[str]:
    """Silences, facts that only the reference knows, and loops that it does not fall into, a line each.

    A reference that never loops excuses none; one that does, as a pruned model may, excuses as many new ones, for
    rounding then only decides which answer it is.

    Args:
        answers, expected_answers: of the first chats, as token ids; the variant's and the reference's.
    """
    found, new_loops, excused = [], [], 0
    for chat, said, expected in zip(chats, answers, expected_answers, strict=False):
        text = tokenizer.decode(said)
        if loops(expected):
            excused += 1
        elif loops(said):
            new_loops.append(f"{chat.question!r}: repeats itself, the reference does not: …{text[-60:]!r}")
        if not said and expected:
            found.append(f"{chat.question!r}: says nothing")
        fact = FACTS.get(chat.question)
        if fact is not None and fact in tokenizer.decode(expected) and fact not in text:
            found.append(f"{chat.question!r}: lost {fact!r}: {text[:60]!r}")
    return found + new_loops if len(new_loops) > excused else found


def loops(ids: Sequence[int]) -> bool:
    """Whether an answer ends in the same few tokens, four times over."""
    for cycle in range(1, min(_LONGEST_CYCLE, len(ids) // _REPEATS) + 1):
        tail = list(ids[-cycle:])
        if all(list(ids[len(ids) - cycle * (turn + 1) : len(ids) - cycle * turn]) == tail for turn in range(_REPEATS)):
            return True
    return False


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))
