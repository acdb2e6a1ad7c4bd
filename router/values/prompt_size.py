"""How long a prompt is whose tokenizer is not at hand."""

from __future__ import annotations

from collections.abc import Sequence

from router.base.errors import ModelNotFound, NoTokenizer, OverspillError
from router.values.prompt import ChatPrompt, Input, PromptSize, TokenPrompt, texts_of
from router.values.replica import ReplicaInfo
from router.values.task import Call, PassedCall, TensorCall

_BYTES_PER_TOKEN = 3.5  # between prose (4.5 to 5) and code (2.5 to 3.5)
_MOST_BYTES_PER_TOKEN = 8  # what no text but a monotonous one exceeds
_TOKENS_PER_MESSAGE = 6
_TOKENS_PER_PART = 512  # images are 64 to 2,000 tokens, a minute of sound 750 to 3,000
_TOKENS_AROUND_TEXT = 2  # what encoders put before and behind a text


def estimate_size(prompt: Input) -> PromptSize:
    """Guess the length of a prompt without its tokenizer, from its UTF-8 size; exact for token ids."""
    if isinstance(prompt, Call):
        return _estimate_call(prompt)
    if isinstance(prompt, TokenPrompt):
        return PromptSize(len(prompt.token_ids))
    texts = texts_of(prompt) if isinstance(prompt, ChatPrompt) else [prompt.text]
    size = len("".join(texts).encode())
    template = _TOKENS_PER_MESSAGE * (len(texts) + 1) if isinstance(prompt, ChatPrompt) else 1
    tokens = int(size / _BYTES_PER_TOKEN) + template
    return PromptSize(tokens, tokens - size // _MOST_BYTES_PER_TOKEN)


def _estimate_call(call: Call) -> PromptSize:
    if isinstance(call, TensorCall):  # counted in inputs; a window holds one
        return PromptSize(call.rows, window=1)
    if isinstance(call, PassedCall):
        sizes = [_of_bytes(size) for size in call.inputs] or [
            PromptSize(1)
        ]  # how long a sound is, its server finds out
    else:
        sizes = [PromptSize(len(one)) if isinstance(one, tuple) else _estimate_text(one) for one in call.inputs]
    whole = sum(sizes, start=PromptSize(0))
    return PromptSize(max(whole.tokens, 1), whole.slack, window=max(size.tokens - size.slack for size in sizes))


def _estimate_text(text: str) -> PromptSize:
    return _of_bytes(len(text.encode("utf-8", "surrogatepass")))


def _of_bytes(size: int) -> PromptSize:
    tokens = int(size / _BYTES_PER_TOKEN) + _TOKENS_AROUND_TEXT
    return PromptSize(tokens, tokens - size // _MOST_BYTES_PER_TOKEN)


def with_media(size: PromptSize, prompt: ChatPrompt) -> PromptSize:
    """Return the size of a conversation with images and sounds, given that of its texts.

    What such a part comes to is known to the model's server alone; the prompt's token ids without it are none of it.
    """
    parts = sum(not isinstance(part, str) for message in prompt.messages for part in message.parts)
    return PromptSize(size.tokens + parts * _TOKENS_PER_PART, size.slack + parts * _TOKENS_PER_PART, size.window)


def no_tokenizer(model: str, infos: Sequence[ReplicaInfo]) -> OverspillError:
    """Return the error for a model whose tokenizer is not on this tier."""
    known = {name for info in infos for name in (info.family, info.variant)}
    if model not in known:
        return ModelNotFound.of(model, known)
    return NoTokenizer(
        f"`model`: the tokenizer of `{model[:80]}` is not on this tier; ask the server that runs the model",
        param="model",
    )
