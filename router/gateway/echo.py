"""Prompts told back: their text in front of an answer, or in the place of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass

from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.gateway.deps import PromptCounter
from router.values.chunk import FinishReason, TokenChunk
from router.values.logprobs import TokenLogprob
from router.values.prompt import Input, TextPrompt, TokenPrompt
from router.values.request import ApiRequest
from router.values.usage import Usage


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt that an answer begins with.

    Attributes:
        text: of the prompt; None where only its tokens tell it, which whoever serves it scores.
    """

    text: str | None

    def before(self, scored: Iterable[TokenLogprob]) -> str:
        """Return the text in front of an answer whose prompt was scored as `scored`."""
        if self.text is not None:
            return self.text
        shown = [token.text.encode() if token.raw is None else token.raw for token in scored if token.shown]
        return b"".join(shown).decode("utf-8", "replace")


def echo_of(prompts: PromptCounter, call: ApiRequest, prompt: Input) -> Echo:
    """Return the echo of a prompt of `call`.

    Raises:
        InvalidRequest: it is token ids, no tokenizer of the model is here, and nobody was asked to score them.
        ModelNotFound: nobody serves the model.
    """
    if isinstance(prompt, TextPrompt):
        return Echo(prompt.text)
    if not isinstance(prompt, TokenPrompt):
        return Echo("")
    try:
        return Echo(prompts.tokenizer(call.model).decode(prompt.token_ids))
    except InvalidRequest:
        if call.sampling.prompt_logprobs:
            return Echo(None)
        raise


async def prompt_alone(chunks: AsyncGenerator[TokenChunk, None]) -> AsyncGenerator[TokenChunk, None]:
    """Yield one chunk, which tells what the first one does of the prompt, and nothing of an answer."""
    async with aclosing(chunks):
        async for chunk in chunks:
            ends = FinishReason.LENGTH
            yield replace(chunk, text="", tokens=0, finish_reason=ends, logprobs=())
            return


def prompt_used(used: Callable[[], Usage]) -> Callable[[], Usage]:
    """Return what tells the usage of an answer that has no tokens: that of the prompt."""
    return lambda: replace(used(), completion_tokens=0)
