"""Counts prompts for every name that this tier answers to: with the model's tokenizer, else by their size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from models.text.chat import PromptEncoder
from router.base.errors import ModelNotFound
from router.values.prompt import Input, PromptSize
from router.values.prompt_size import estimate_size, no_tokenizer
from router.values.replica import ReplicaInfo
from router.values.task import Call


class TierPrompts:
    """`router.gateway.deps.PromptCounter` on the tokenizers of this tier's models."""

    def __init__(self, encoders: Mapping[str, PromptEncoder], infos: Callable[[], Sequence[ReplicaInfo]]) -> None:
        """Take encoders by family and variant name, and what the engines' windows are now."""
        self._encoders = dict(encoders)
        self._infos = infos

    def count(self, model: str, prompt: Input) -> PromptSize:
        """Return the length of the rendered prompt.

        Raises:
            ModelNotFound: the tier serves no such model.
            ContextTooLong: it cannot fit any window, whatever it says.
            InvalidRequest: the prompt cannot be encoded.
        """
        encoder = self._encoders.get(model)
        if encoder is None or isinstance(prompt, Call):
            infos = self._infos()
            if not any(model in (info.family, info.variant) for info in infos):
                raise ModelNotFound.of(model, {name for info in infos for name in (info.family, info.variant)})
            return estimate_size(prompt)  # its server counts, or its pipeline, and decides
        windows = [info.context_tokens for info in self._infos() if model in (info.family, info.variant)]
        encoder.refuse_hopeless(prompt, model, max(windows))
        return PromptSize.of(encoder.encode(prompt), encoder)

    def tokenizer(self, model: str) -> PromptEncoder:
        """See `router.gateway.deps.PromptCounter`."""
        encoder = self._encoders.get(model)
        if encoder is not None:
            return encoder
        raise no_tokenizer(model, self._infos())
