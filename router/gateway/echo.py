"""Prompts told back: their text in front of an answer, or in the place of one."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from msgspec.structs import replace

from router.gateway.deps import PromptCounter
from router.values.chunk import FinishReason, TokenChunk
from router.values.prompt import Input, TextPrompt, TokenPrompt
from router.values.usage import Usage


def echoed(prompts: PromptCounter, model: str, prompt: Input) -> str:
    """Return the text of a prompt.

    Raises:
        InvalidRequest: it is token ids, and no tokenizer of the model is here.
    """
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return prompts.tokenizer(model).decode(prompt.token_ids) if isinstance(prompt, TokenPrompt) else ""


async def prompt_alone(chunks: AsyncGenerator[TokenChunk, None]) -> AsyncGenerator[TokenChunk, None]:
    """Yield one chunk, which tells what the first one does of the prompt, and nothing of an answer."""
    async with aclosing(chunks):
        async for chunk in chunks:
            ends = FinishReason.LENGTH
            yield replace(chunk, text="", tokens=0, finish_reason=ends, logprobs=())
            return


def prompt_used(used: Callable[[], Usage]) -> Callable[[], Usage]:
    """Return what tells the usage of such an answer: that of the prompt."""
    return lambda: replace(used(), completion_tokens=0)
