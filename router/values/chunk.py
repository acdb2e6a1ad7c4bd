"""What comes back of a request: pieces of a streamed answer."""

from __future__ import annotations

import enum

import msgspec

from router.values.logprobs import TokenLogprob
from router.values.task import Output
from router.values.usage import TokenDetails


class FinishReason(enum.Enum):
    """Why generation ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class Origin(msgspec.Struct, frozen=True):
    """Who really answered, as told by the replica (an upstream tier routes again and may step down).

    Attributes:
        max_tokens: the answer cap the upstream put in force, None if the caller's own stands.
    """

    tier: str
    variant: str
    rung: int
    degraded: bool = False
    reason: str = ""
    max_tokens: int | None = None


class TokenChunk(msgspec.Struct, frozen=True):
    """A piece of a streamed answer.

    Attributes:
        text: new text, possibly empty (a token can end in the middle of a UTF-8 character or of a stop string).
        tokens: how many generated tokens this chunk stands for.
        finish_reason: set on the last chunk only, and always set there; a stream that ends without it broke.
        prompt_tokens: set on the last chunk by a replica that counted the prompt itself, and on the first one by an
            upstream that tells it with each event, else None.
        logprobs: of the tokens that `text` shows, where they were asked for.
        prompt_logprobs: of the prompt's tokens, set on the first chunk where they were asked for.
        cached_tokens: how many tokens of the prompt were in a KV cache already and not computed: set on the first chunk
            by a replica that knows it then, on the last one by an upstream that tells it with its usage, else None.
        origin: set on the first chunk by an upstream tier, else None.
        output: what a call came to, on its only chunk; None of generated text.
        own_s: on that chunk, the seconds that the replica itself took for it, where it runs in this process: of a few
            milliseconds, what a busy event loop adds on either side would be the larger part. None elsewhere.
        details: of the tokens of prompt and answer, on the last chunk, where an upstream tells them.
        reasoning: what the model thought, where a server tells that apart from its answer: no part of `text`.
        stop: the stop string that ended the answer, on the last chunk; None where none did, or nobody tells which.
    """

    text: str
    tokens: int = 1
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    origin: Origin | None = None
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    output: Output | None = None
    own_s: float | None = None
    details: TokenDetails | None = None
    reasoning: str = ""
    stop: str | None = None

    @property
    def is_text(self) -> bool:
        """It shows text or thoughts, and says nothing of where they come from or how the answer ends."""
        shown = self.text or self.reasoning
        return bool(shown) and self.finish_reason is None and self.output is None and self.origin is None
