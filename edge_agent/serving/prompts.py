"""Tokenizers and chat templates of the models this agent knows: each is read once, by whoever needs it first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from models.text.chat import PromptEncoder
from models.text.grammar import Grammars
from models.text.logprobs import LogprobStream
from models.text.stream import TextStream
from router.values.prompt import Input, Prompt, PromptSize, TextPrompt
from router.values.prompt_size import estimate_size, no_tokenizer
from router.values.replica import ReplicaInfo
from router.values.task import Call


class PromptCodec:
    """The prompt side of one family, read when it is first used. Safe to use from several threads.

    Attributes:
        grammars: compiles constraints on answers over its vocabulary.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._encoder: PromptEncoder | None = None
        self.grammars = Grammars(lambda: self.encoder.tokenizer)

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

    def text_stream(
        self,
        stop: Sequence[str],
        continuation: str,
        unwatched_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> TextStream:
        return TextStream(self.encoder.tokenizer, stop, continuation, unwatched_tokens, shown)

    def logprob_stream(self) -> LogprobStream:
        return LogprobStream(self.encoder.tokenizer)


class PromptCounters:
    """Counts prompts for the gateway: `router.gateway.deps.PromptCounter`.

    Where no tokenizer on this device fits, prompts are estimated by size; the upstream counts again and decides.

    Args:
        infos: every replica there is now, local and remote.

    Attributes:
        codecs: by family and by variant name; replaced as a whole when the models change.
    """

    def __init__(self, infos: Callable[[], Sequence[ReplicaInfo]]) -> None:
        self.codecs: Mapping[str, PromptCodec] = {}
        self._infos = infos

    def count(self, model: str, prompt: Input) -> PromptSize:
        """Return the length of the rendered prompt, or an estimate where no tokenizer is known for `model`.

        Raises:
            ContextTooLong: it cannot fit any window, here or upstream, whatever it says.
            InvalidRequest: the prompt cannot be encoded.
        """
        codec = self.codecs.get(model)
        if codec is not None and not isinstance(prompt, Call):
            windows = [info.context_tokens for info in self._infos() if model in (info.family, info.variant)]
            if windows:
                codec.encoder.refuse_hopeless(prompt, model, max(windows))
            return PromptSize.of(codec.encode(prompt), codec.encoder)
        return estimate_size(prompt)

    def tokenizer(self, model: str) -> PromptEncoder:
        """See `router.gateway.deps.PromptCounter`."""
        codec = self.codecs.get(model)
        if codec is not None:
            return codec.encoder
        raise no_tokenizer(model, self._infos())
