"""Tokenizers and chat templates of the models this agent knows: each is read once, by whoever needs it first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from models.chat import PromptEncoder
from models.tokenizer import TextStream
from router.errors import ModelNotFound
from router.wire.inference import ChatPrompt, Prompt, TextPrompt

_BYTES_PER_TOKEN = 3.5
_TOKENS_PER_MESSAGE = 6


class PromptCodec:
    """The prompt side of one family, read when it is first used. Safe to use from several threads."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._encoder: PromptEncoder | None = None

    @property
    def encoder(self) -> PromptEncoder:
        with self._lock:
            if self._encoder is None:
                self._encoder = PromptEncoder.load(self._source)
            return self._encoder

    def warm(self) -> None:
        """Read the tokenizer now: a few hundred milliseconds that the first request should not pay."""
        self.encode(TextPrompt("warm"))

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.encoder.tokenizer.eos_ids

    @property
    def vocab_size(self) -> int:
        return self.encoder.tokenizer.vocab_size

    def encode(self, prompt: Prompt, continuation: str = "") -> list[int]:
        return self.encoder.encode(prompt, continuation)

    def text_stream(self, stop: Sequence[str], continuation: str) -> TextStream:
        return TextStream(self.encoder.tokenizer, stop, prompt_tail=continuation)


class PromptCounters:
    """Counts prompts for the gateway: `router.gateway.deps.PromptCounter`.

    Args:
        elsewhere: names that an upstream tier serves. Where no tokenizer on this device fits, their prompts are
            estimated by size; the upstream counts again and decides.

    Attributes:
        codecs: by family and by variant name; replaced as a whole when the models change.
    """

    def __init__(self, elsewhere: Callable[[], frozenset[str]]) -> None:
        self.codecs: Mapping[str, PromptCodec] = {}
        self._elsewhere = elsewhere

    def count(self, model: str, prompt: Prompt) -> int:
        """Return the length of the rendered prompt, in tokens.

        Raises:
            ModelNotFound: neither this device nor its upstream knows the model.
            InvalidRequest: the prompt cannot be encoded.
        """
        codec = self.codecs.get(model)
        if codec is not None:
            return len(codec.encode(prompt))
        others = self._elsewhere()
        if model not in others:
            known = ", ".join(sorted({*self.codecs, *others})) or "none"
            raise ModelNotFound(f"model `{model}` is not served here; known: {known}", param="model")
        return estimate_tokens(prompt)


def estimate_tokens(prompt: Prompt) -> int:
    """Guess the length of a prompt without its tokenizer, from its UTF-8 size; exact for token ids."""
    if isinstance(prompt, ChatPrompt):
        size = sum(len(message.content.encode()) for message in prompt.messages)
        return int(size / _BYTES_PER_TOKEN) + _TOKENS_PER_MESSAGE * (len(prompt.messages) + 1)
    if isinstance(prompt, TextPrompt):
        return int(len(prompt.text.encode()) / _BYTES_PER_TOKEN) + 1
    return len(prompt.token_ids)
