"""What an engine generates, as text: chunk for chunk, up to a stop string, with its log probabilities."""

from __future__ import annotations

from msgspec.structs import replace

from cloud_tier.engine.protocol import EngineChunk
from models.text.logprobs import LogprobStream
from models.text.stream import TextStream
from models.text.tokenizer import Tokenizer
from router.values.chunk import FinishReason, TokenChunk


class Told:
    """One answer.

    Args:
        logprobs: log probabilities were asked for.
    """

    def __init__(self, text: TextStream, tokenizer: Tokenizer, prompt_tokens: int, *, logprobs: bool) -> None:
        self._text = text
        self._prompt_tokens = prompt_tokens
        self._logprobs = LogprobStream(tokenizer) if logprobs else None

    def chunk(self, new: EngineChunk) -> TokenChunk:
        """Return what the caller reads of it; it ends with a stop string, or as the engine ended it."""
        delta = self._text.push(new.token_ids)
        text, tokens, reason = delta.text, delta.tokens, new.finish_reason
        if delta.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            text += self._text.finish()
            tokens += new.closed  # the token that ended it was generated too
        prompt_tokens = None if reason is None else self._prompt_tokens
        chunk = TokenChunk(text, tokens, reason, prompt_tokens, cached_tokens=new.cached_tokens, stop=delta.stop)
        if self._logprobs is None:
            return chunk
        return self._with_logprobs(chunk, new, self._logprobs, whole=reason is not None and not delta.stopped)

    @staticmethod
    def _with_logprobs(chunk: TokenChunk, new: EngineChunk, line: LogprobStream, *, whole: bool) -> TokenChunk:
        line.push(new.logprobs)
        shown = line.shown(chunk.text, whole=whole)
        return replace(chunk, logprobs=shown, prompt_logprobs=line.told(new.prompt_logprobs))
