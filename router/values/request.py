"""What one request is, between any two stages of a tier. Pure values."""

from __future__ import annotations

import enum

import msgspec

from router.base.errors import InvalidRequest
from router.values.feature import NOTHING, Feature
from router.values.prompt import ChatPrompt, EncodedPrompt, Input, Prompt, TokenPrompt
from router.values.sampling import SamplingParams
from router.values.task import Call, PassedCall, Task


class Locality(enum.Enum):
    """Where a request may run. Holds through every failover and continuation."""

    ANY = "any"
    LOCAL_ONLY = "local-only"
    CLOUD_ONLY = "cloud-only"


class Outcome(enum.Enum):
    """How a request ended (see the glossary in docs/architecture.md); `invalid` is the caller's own 4xx."""

    COMPLETED = "completed"
    DEGRADED = "degraded"
    SHED = "shed"
    UNAVAILABLE = "unavailable"
    INVALID = "invalid"
    EVICTED = "evicted"
    CANCELLED = "cancelled"
    FAILED = "failed"


ANSWERED = (Outcome.COMPLETED, Outcome.DEGRADED)
"""The caller got an answer. No set: to hash a member of an enum is a call in Python."""


class CacheUse(enum.Enum):
    """What a caller lets the cache of answers do."""

    FULL = "full"
    REFRESH = "no-cache"
    """Compute the answer, and keep it."""
    NOTHING = "no-store"
    """Neither give a kept answer nor keep this one."""


SLACK_PRIORITY = -(2**31 - 1)
"""The lowest that can be asked for: it is served when nobody else is, and is no reason to step down or to scale."""
LINE_PRIORITY = SLACK_PRIORITY - 1
"""Of the lines that this tier runs itself, and nobody else's: they are held up where a replica can do that."""


class Objective(msgspec.Struct, frozen=True):
    """The promise the caller asks for. None means: no promise of that kind.

    Attributes:
        ttft_s: accepted → first non-empty token, in seconds.
        tpot_s: (end to end − TTFT) / (n − 1), in seconds a token.
        deadline_s: accepted → last token, in seconds.
        late_s: seconds after the deadline over which the value of the answer falls from 1 to 0; None: at once.
        shorten: an overloaded tier may cap the answer at `overload_answer_tokens`.
        defer: what cannot be served within its promise is kept, and answered later.
        priority: higher is better; negative may be shed first.
        min_quality: lowest acceptable quality of a rung, in [0, 1].
        session: requests of one session prefer one replica.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None
    late_s: float | None = None
    shorten: bool = False
    defer: bool = False
    priority: int = 0
    locality: Locality = Locality.ANY
    min_quality: float = 0.0
    session: str | None = None

    @property
    def in_slack(self) -> bool:
        """Whether it asks for what nobody else needs."""
        return self.priority <= SLACK_PRIORITY

    @property
    def yields(self) -> bool:
        """Whether it is held up for all others, where a replica can do that (`ReplicaInfo.holds_up`)."""
        return self.priority <= LINE_PRIORITY

    @property
    def ends_s(self) -> float | None:
        """Accepted → an answer is worth nothing any more, in seconds; None without a deadline."""
        return None if self.deadline_s is None else self.deadline_s + (self.late_s or 0.0)

    def value_at(self, finish_s: float) -> float:
        """What an answer whose last token comes `finish_s` after its request was accepted is worth, from 1 to 0."""
        if self.deadline_s is None or finish_s <= self.deadline_s:
            return 1.0
        return max(0.0, 1.0 - (finish_s - self.deadline_s) / self.late_s) if self.late_s else 0.0


class ApiRequest(msgspec.Struct, frozen=True):
    """What a caller asks of any API, as its body says it.

    Attributes:
        others: further prompts of the same call.
        n: how many choices are wanted of each prompt.
        echo: each answer begins with its prompt.
        unanswered: nothing is to be generated: the prompt is echoed alone.
        stream: the answer is wanted as server-sent events.
        include_usage: a final event with usage and no choices.
        running_usage: usage in every event (`continuous_usage_stats`): the exact token count of each.
        brief: a tier below asks for events that hold what is new.
        priority, deadline_s: the header of the same meaning beats them.
        continuation: text of the answer that another replica already emitted.
        legacy_functions: calls are told in OpenAI's older way.
        custom_tools: of these the calls are told as text.
        cache_salt: of whom the caller speaks for; the header of the same meaning beats it.
    """

    model: str
    prompt: Input
    sampling: SamplingParams
    continuation: str = ""
    legacy_functions: bool = False
    custom_tools: frozenset[str] = frozenset()
    others: tuple[Prompt, ...] = ()
    n: int = 1
    echo: bool = False
    unanswered: bool = False
    stream: bool = False
    include_usage: bool = False
    running_usage: bool = False
    brief: bool = False
    priority: int | None = None
    deadline_s: float | None = None
    cache_salt: str = ""


class InferenceRequest(msgspec.Struct, frozen=True):
    """One request as every stage after the gateway sees it.

    Attributes:
        model: what the caller named: a family (any rung may serve it) or one exact variant (only that one may).
        prompt_tokens: length of the rendered prompt, counted by the gateway's tokenizer, or estimated without one.
        prompt_bytes: size of the prompt on the wire, for the uplink term of a prediction.
        accepted_at_s: when the gateway accepted it, on the tier's `Clock`.
        continuation: text of the answer already emitted by another replica; the serving replica renders it as the
            beginning of the assistant's turn, continues after it and never repeats it.
        continuation_tokens: how many tokens that text counts for against `sampling.max_tokens`.
        caller: digest of the key that it came with; empty where the tier has no keys.
        cache_salt: tells those apart for whom the caller speaks, so that they share no KV cache; empty if it does not.
        headers: trace context to pass on (`traceparent`), lower-case names.
        prompt_slack: by how much `prompt_tokens` may be too high; 0 unless it was estimated.
        window_tokens: what one window has to hold of it, as in `PromptSize`.
        encoded: the prompt's token ids, where the gateway has them.
        attempts_left: replicas that may be tried for it, this tier's own bound (`max_attempts`) apart; None: no other.
        cache: what caches of answers may do with it, here and in tiers behind.
    """

    request_id: str
    model: str
    prompt: Input
    sampling: SamplingParams
    objective: Objective
    prompt_tokens: int
    accepted_at_s: float
    prompt_bytes: int = 0
    continuation: str = ""
    continuation_tokens: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    prompt_slack: int = 0
    window_tokens: int | None = None
    caller: str = ""
    cache_salt: str = ""
    encoded: EncodedPrompt | None = None
    attempts_left: int | None = None
    cache: CacheUse = CacheUse.FULL

    def __repr__(self) -> str:  # neither its prompt nor who asks
        return f"InferenceRequest({self.request_id!r}, {self.model!r})"

    @property
    def task(self) -> Task:
        """What is asked of the model."""
        return self.prompt.task if isinstance(self.prompt, Call) else Task.GENERATE

    @property
    def to_continue(self) -> Prompt:
        """Its prompt, for a model that generates text.

        Raises:
            InvalidRequest: it is a call.
        """
        if isinstance(self.prompt, Call):
            raise InvalidRequest(f"this model generates text, it does not {self.task.value}", param="model")
        return self.prompt

    @property
    def wants(self) -> frozenset[Feature]:
        """What a replica has to offer: `OFFERED` of it, which is nothing as a rule."""
        prompt = self.prompt
        found = prompt.media if isinstance(prompt, ChatPrompt) else NOTHING
        if isinstance(prompt, PassedCall) and prompt.task is Task.TOKENIZE:
            found = frozenset({Feature.TOKENIZE})
        return found | {Feature.BAD_WORDS} if self.sampling.bad_words else found

    def needs(self) -> frozenset[Feature]:
        """What a replica has to do beyond plain text in and text out, but for `wants`."""
        prompt, needs = self.prompt, self.sampling.needs()
        if isinstance(prompt, Call):
            return frozenset()
        if not self.scores_prompt:
            needs.discard(Feature.PROMPT_LOGPROBS)
        if isinstance(prompt, ChatPrompt):
            needs.add(Feature.CONTINUED_CHAT if self.continuation else Feature.CHAT)
            if prompt.template_kwargs:
                needs.add(Feature.TEMPLATE_KWARGS)
            if prompt.uses_tools:
                needs |= {Feature.TOOLS, Feature.CONTINUED_TOOLS} if self.continuation else {Feature.TOOLS}
        elif isinstance(prompt, TokenPrompt):
            needs.add(Feature.CONTINUED_IDS if self.continuation else Feature.PROMPT_IDS)
        else:
            needs.add(Feature.COMPLETIONS)
        if self.continuation and self.sampling.constraint is not None:
            needs.add(Feature.CONTINUED_CONSTRAINT)
        return frozenset(needs)

    def token_ids(self, encoder: object) -> list[int] | None:
        """Return prompt and continuation as `encoder` would encode them, None where that was not done yet."""
        encoded = self.encoded
        return None if encoded is None or encoded.encoder is not encoder or self.continuation else [*encoded.token_ids]

    @property
    def scores_prompt(self) -> bool:
        """Whether those of the prompt are still to be told: they go with the first text of an answer."""
        return self.sampling.prompt_logprobs and not self.continuation

    @property
    def min_tokens_left(self) -> int:
        """How many tokens the rest of the answer has at least."""
        return max(0, self.sampling.min_tokens - self.continuation_tokens)

    @property
    def cache_owner(self) -> str:
        """Whose KV caches this request may use and adds to; nobody else's timing tells of its prompt."""
        return f"{self.caller}/{self.cache_salt}" if self.caller or self.cache_salt else ""

    @property
    def least_prompt_tokens(self) -> int:
        """What the prompt surely has: only this may rule out a window. Who serves it counts, and decides.

        Of a call it is one input, less the token that its answer counts as and that takes no room.
        """
        return self.prompt_tokens - self.prompt_slack if self.window_tokens is None else self.window_tokens - 1

    def most_answer_tokens(self, context_tokens: int) -> int:
        """Longest rest of the answer that the caller's cap and a window allow; at least 1."""
        room, cap = context_tokens - self.least_prompt_tokens, self.sampling.max_tokens
        return max(1, room if cap is None else min(room, cap - self.continuation_tokens))
