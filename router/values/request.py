"""What one request is, and what comes back, between any two stages of a tier. Pure values."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from router.base.errors import InvalidRequest
from router.values.constraint import Constraint, ConstraintKind
from router.values.logprobs import TokenLogprob
from router.values.task import Call, Output, Task
from router.values.tool_calls import ToolCall, Tools


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


class Feature(enum.Enum):
    """What a request may need of a replica, and not every server does; the value is its name in messages."""

    CHAT = "chat"
    COMPLETIONS = "raw completions"
    PROMPT_IDS = "prompts of token ids"
    TOP_K = "top_k"
    PENALTIES = "presence and frequency penalties"
    REPETITION_PENALTY = "repetition_penalty"
    IGNORE_EOS = "ignore_eos"
    SEED = "seed"
    MIN_P = "min_p"
    MIN_TOKENS = "min_tokens"
    STOP_IDS = "stop_token_ids"
    LOGIT_BIAS = "logit_bias"
    ALLOWED_IDS = "allowed_token_ids"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "log probabilities of the prompt"
    CONTINUED_CHAT = "continuing a chat answer that broke off"
    CONTINUED_IDS = "continuing an answer to token ids that broke off"
    JSON_SCHEMA = "answers by a JSON schema"
    REGEX = "answers by a regular expression"
    CHOICE = "answers out of a list of choices"
    LARK = "answers by a grammar in Lark's notation"
    GBNF = "answers by a grammar in llama.cpp's notation"
    CONTINUED_CONSTRAINT = "continuing a constrained answer that broke off"
    TOOLS = "tools"
    CONTINUED_TOOLS = "continuing an answer with tools that broke off"


FEATURE_OF = {
    ConstraintKind.JSON_SCHEMA: Feature.JSON_SCHEMA,
    ConstraintKind.REGEX: Feature.REGEX,
    ConstraintKind.CHOICE: Feature.CHOICE,
    ConstraintKind.LARK: Feature.LARK,
    ConstraintKind.GBNF: Feature.GBNF,
}


class CacheUse(enum.Enum):
    """What a caller lets the cache of answers do."""

    FULL = "full"
    REFRESH = "no-cache"
    """Compute the answer, and keep it."""
    NOTHING = "no-store"
    """Neither give a kept answer nor keep this one."""


class FinishReason(enum.Enum):
    """Why generation ended, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn; `content` is plain text (content parts are joined by the codec).

    Attributes:
        tool_calls: what an assistant's turn called.
        call_id: whose result a turn of the role `tool` is.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, to be rendered by the chat template of the model that serves it.

    Attributes:
        tools: what the answer may call; None where the request has none.
    """

    messages: tuple[Message, ...]
    tools: Tools | None = None

    @property
    def uses_tools(self) -> bool:
        """Whether it takes a server that knows of tools."""
        return self.tools is not None or any(message.tool_calls or message.role == "tool" for message in self.messages)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Raw text to continue."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to continue; valid only for models that share the tokenizer."""

    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt
Input = Prompt | Call

IN_THREAD_CHARS = 20_000
"""Prompts from this size on take long enough to encode that a worker thread should do it, not the event loop."""
_MESSAGE_CHARS = 32  # what an empty message costs the template, as text


def texts_of(prompt: ChatPrompt) -> Iterator[str]:
    """Return the texts of a conversation: what was said and called, and the tools."""
    for message in prompt.messages:
        yield message.content
        for call in message.tool_calls:
            yield call.name + call.arguments
    for tool in () if prompt.tools is None else prompt.tools.offered:
        yield tool.name + tool.description + tool.parameters


def size_chars(prompt: Input) -> int:
    """Return how much text there is to encode; 0 for token ids, and for calls, which their replica encodes."""
    if isinstance(prompt, ChatPrompt):
        return sum(len(text) + _MESSAGE_CHARS for text in texts_of(prompt))
    return len(prompt.text) if isinstance(prompt, TextPrompt) else 0


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A rendered prompt as token ids, so that what was encoded to be counted is not encoded again to be served.

    Attributes:
        encoder: what encoded it; only a replica with the very same one takes the ids.
    """

    token_ids: tuple[int, ...]
    encoder: object


@dataclass(frozen=True, slots=True)
class PromptSize:
    """How long a rendered prompt is, in tokens.

    Attributes:
        tokens: counted with the tokenizer of the model, or else the likeliest figure.
        slack: by how much that figure may be too high; 0 where it was counted.
        window: what one window has to hold where that is not all of it: the longest input of a call, at the least.
        encoded: what was counted, if that was this prompt alone.
    """

    tokens: int
    slack: int = 0
    window: int | None = None
    encoded: EncodedPrompt | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, token_ids: Sequence[int], encoder: object) -> PromptSize:
        return cls(len(token_ids), encoded=EncodedPrompt(tuple(token_ids), encoder))

    def __add__(self, other: PromptSize) -> PromptSize:
        return PromptSize(self.tokens + other.tokens, self.slack + other.slack)


GREEDY_BELOW = 1e-5
"""A temperature below this takes the likeliest token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn.

    Attributes:
        max_tokens: upper bound on generated tokens; None means up to the end of the context window.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k most likely tokens; 0 keeps all.
        seed: makes the draw reproducible on one replica and batch-independent.
        stop: generation ends before the first of these strings that appears and does not emit it.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens, in [-2, 2].
        repetition_penalty: CTRL's, over prompt and generated tokens; 1 is off.
        ignore_eos: keep generating past the end-of-turn token (load generators use it).
        min_p: keep tokens at least this times as likely as the likeliest, in [0, 1]; 0 keeps all.
        min_tokens: no end-of-turn token, stop token or stop string ends the answer before it has so many tokens.
        stop_token_ids: any of these ends the answer too and is not emitted, whatever `ignore_eos` says.
        logit_bias: (token id, what is added to its logit).
        allowed_token_ids: only these may be drawn; empty allows all.
        logprobs: how many alternatives are told beside the log probability of each token; None tells none at all.
        prompt_logprobs: the log probabilities of the prompt's tokens are told too.
        constraint: what the whole answer has to match; None leaves it free.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    constraint: Constraint | None = None

    def needs(self) -> set[Feature]:
        """What a replica has to do beyond drawing by temperature and top-p up to a stop string."""
        asked = {
            Feature.TOP_K: self.top_k,
            Feature.PENALTIES: self.presence_penalty or self.frequency_penalty,
            Feature.REPETITION_PENALTY: self.repetition_penalty != 1.0,
            Feature.IGNORE_EOS: self.ignore_eos,
            Feature.SEED: self.seed is not None,
            Feature.MIN_P: self.min_p,
            Feature.MIN_TOKENS: self.min_tokens,
            Feature.STOP_IDS: self.stop_token_ids,
            Feature.LOGIT_BIAS: self.logit_bias,
            Feature.ALLOWED_IDS: self.allowed_token_ids,
            Feature.LOGPROBS: self.logprobs is not None,
            Feature.PROMPT_LOGPROBS: self.prompt_logprobs,
        }
        needs = {feature for feature, wanted in asked.items() if wanted}
        return needs if self.constraint is None else {*needs, FEATURE_OF[self.constraint.kind]}

    @property
    def repeatable(self) -> bool:
        """Whether the caller asked for an answer that comes out the same each time."""
        return self.temperature < GREEDY_BELOW or self.seed is not None


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """What a caller asks of any API, as its body says it.

    Attributes:
        others: further prompts of the same call.
        n: how many choices are wanted of each prompt.
        echo: each answer begins with its prompt.
        unanswered: nothing is to be generated: the prompt is echoed alone.
        stream: the answer is wanted as server-sent events.
        include_usage: a final event with usage and no choices.
        running_usage: usage in every event (`continuous_usage_stats`): the exact token count of each.
        priority, deadline_s: the header of the same meaning beats them.
        continuation: text of the answer that another replica already emitted.
        legacy_functions: calls are told in OpenAI's older way.
    """

    model: str
    prompt: Input
    sampling: SamplingParams
    continuation: str = ""
    legacy_functions: bool = False
    others: tuple[Prompt, ...] = ()
    n: int = 1
    echo: bool = False
    unanswered: bool = False
    stream: bool = False
    include_usage: bool = False
    running_usage: bool = False
    priority: int | None = None
    deadline_s: float | None = None


SLACK_PRIORITY = -(2**31 - 1)
"""The lowest that can be asked for: it is served when nobody else is, and is no reason to step down or to scale."""


@dataclass(frozen=True, slots=True)
class Objective:
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
    def ends_s(self) -> float | None:
        """Accepted → an answer is worth nothing any more, in seconds; None without a deadline."""
        return None if self.deadline_s is None else self.deadline_s + (self.late_s or 0.0)

    def value_at(self, finish_s: float) -> float:
        """What an answer whose last token comes `finish_s` after its request was accepted is worth, from 1 to 0."""
        if self.deadline_s is None or finish_s <= self.deadline_s:
            return 1.0
        return max(0.0, 1.0 - (finish_s - self.deadline_s) / self.late_s) if self.late_s else 0.0


@dataclass(frozen=True, slots=True)
class InferenceRequest:
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
    caller: str = field(default="", repr=False)
    cache_salt: str = field(default="", repr=False)
    encoded: EncodedPrompt | None = field(default=None, compare=False, repr=False)
    attempts_left: int | None = None
    cache: CacheUse = CacheUse.FULL

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

    def needs(self) -> frozenset[Feature]:
        """What a replica has to do beyond plain text in and text out."""
        prompt, needs = self.prompt, self.sampling.needs()
        if isinstance(prompt, Call):
            return frozenset()
        if not self.scores_prompt:
            needs.discard(Feature.PROMPT_LOGPROBS)
        if isinstance(prompt, ChatPrompt):
            needs.add(Feature.CONTINUED_CHAT if self.continuation else Feature.CHAT)
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


@dataclass(frozen=True, slots=True)
class Origin:
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


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """A piece of a streamed answer.

    Attributes:
        text: new text, possibly empty (a token can end in the middle of a UTF-8 character or of a stop string).
        tokens: how many generated tokens this chunk stands for.
        finish_reason: set on the last chunk only, and always set there; a stream that ends without it broke.
        prompt_tokens: set on the last chunk by a replica that counted the prompt itself, else None.
        logprobs: of the tokens that `text` shows, where they were asked for.
        prompt_logprobs: of the prompt's tokens, set on the first chunk where they were asked for.
        cached_tokens: how many tokens of the prompt were in a KV cache already and not computed: set on the first chunk
            by a replica that knows it then, on the last one by an upstream that tells it with its usage, else None.
        origin: set on the first chunk by an upstream tier, else None.
        output: what a call came to, on its only chunk; None of generated text.
        own_s: on that chunk, the seconds that the replica itself took for it, where it runs in this process: of a few
            milliseconds, what a busy event loop adds on either side would be the larger part. None elsewhere.
    """

    text: str
    tokens: int = 1
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    origin: Origin | None = field(default=None, repr=False)
    cached_tokens: int | None = None
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    prompt_logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    output: Output | None = field(default=None, repr=False)
    own_s: float | None = None
