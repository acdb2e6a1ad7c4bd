"""What servers that speak OpenAI's API understand beyond it, and how to tell which of them one is.

`owned_by` of `GET /v1/models` tells: every server here fills it in with its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal

from router.upstream.codec import constrained
from router.values.feature import NOTHING, Feature
from router.values.prompt import ChatPrompt
from router.values.request import InferenceRequest
from router.values.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a request is put to one kind of server.

    Attributes:
        ours: another tier of Overspill: promises, budget and continuations travel in our own headers and fields.
        prefills_chat: how a chat answer that broke off is continued: `flagged` wants vLLM's
            `continue_final_message`, `plain` goes on with a last message of the assistant by itself, `no` starts anew.
        running_usage: takes `continuous_usage_stats`: the exact count of tokens in every event.
        orca: tells the load of each of its variants on a reply, where asked to.
        spelling: a sampling parameter's name in `SamplingParams` → its name there; one that is missing is not taken.
        token_ids: takes prompts of token ids.
        logprobs: tells log probabilities; prompt_logprobs: those of a prompt too, with `echo`.
        least_top_logprobs: how many alternatives it has to be asked for to tell any.
        constraints: how it takes what an answer has to match.
        tools: takes tools; `strictly`: arguments match their schema only where that is asked for.
        template_kwargs: takes `chat_template_kwargs`.
        salts: takes `cache_salt`: requests of others find nothing of this one in its KV cache.
        offers: of what only some servers do, what it does; images and sounds are a matter of its model.
        neutral: what is said where the request says nothing, because the server's own default is another than OpenAI's:
            a model's `generation_config.json`, or a sampler of its own.
    """

    name: str
    spelling: Mapping[str, str]
    ours: bool = False
    prefills_chat: str = "no"
    running_usage: bool = False
    orca: bool = False
    token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    least_top_logprobs: int = 0
    neutral: Mapping[str, object] | None = None
    constraints: constrained.Spellings = field(default_factory=lambda: constrained.OPENAI)
    tools: Literal["no", "yes", "strictly"] = "yes"
    template_kwargs: bool = False
    salts: bool = False
    offers: frozenset[Feature] = NOTHING
    _values_of: Callable[[SamplingParams], tuple[Any, ...]] = field(init=False, repr=False, compare=False)
    _usual: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_values_of", attrgetter(*self.spelling))
        object.__setattr__(self, "_usual", self._values_of(SamplingParams()))

    def asked(self, sampling: SamplingParams) -> list[tuple[str, str, Any]]:
        """Return what differs from the defaults, of what is taken: name, name there, value. It is nothing as a rule."""
        values = self._values_of(sampling)
        if values == self._usual:
            return []
        told = zip(self.spelling.items(), values, self._usual, strict=True)
        return [(name, spelled, value) for (name, spelled), value, usual in told if value != usual]

    @property
    def lacks(self) -> frozenset[Feature]:
        """What requests may need and it does not do."""
        if self.ours:
            return frozenset()
        lacking = {feature for parameter, feature in _NEEDED.items() if parameter not in self.spelling}
        if self.prefills_chat == "no":
            lacking.add(Feature.CONTINUED_CHAT)
        if not self.token_ids:
            lacking.add(Feature.PROMPT_IDS)
        if not self.logprobs:
            lacking.add(Feature.LOGPROBS)
        if not self.prompt_logprobs:
            lacking.add(Feature.PROMPT_LOGPROBS)
        if self.tools == "no":
            lacking.add(Feature.TOOLS)
        if not self.template_kwargs:
            lacking.add(Feature.TEMPLATE_KWARGS)
        return frozenset(
            {*lacking, Feature.CONTINUED_IDS, Feature.CONTINUED_TOOLS, *constrained.lacking(self.constraints)}
        )

    def continues(self, request: InferenceRequest) -> dict[str, object]:
        """Return the fields that make a chat go on with `request.continuation`, its last message."""
        if not (request.continuation and isinstance(request.prompt, ChatPrompt)) or self.prefills_chat != "flagged":
            return {}
        return {"continue_final_message": True, "add_generation_prompt": False}


_NEEDED = {
    "top_k": Feature.TOP_K,
    "presence_penalty": Feature.PENALTIES,
    "repetition_penalty": Feature.REPETITION_PENALTY,
    "ignore_eos": Feature.IGNORE_EOS,
    "seed": Feature.SEED,
    "min_p": Feature.MIN_P,
    "min_tokens": Feature.MIN_TOKENS,
    "stop_token_ids": Feature.STOP_IDS,
    "logit_bias": Feature.LOGIT_BIAS,
    "allowed_token_ids": Feature.ALLOWED_IDS,
}


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_OPENAI = _same("top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "reasoning_effort")
_SGLANG = _OPENAI | _same("top_k", "repetition_penalty", "ignore_eos", "min_p", "min_tokens", "stop_token_ids")
_EXTENDED = MappingProxyType(_SGLANG | _same("allowed_token_ids", "bad_words"))

OVERSPILL = Dialect(
    "overspill",
    ours=True,
    prefills_chat="flagged",
    running_usage=True,
    orca=True,
    spelling=_EXTENDED,
    token_ids=True,
    logprobs=True,
    prompt_logprobs=True,
    constraints=constrained.OVERSPILL,
)
PLAIN = Dialect("plain", spelling=MappingProxyType(_OPENAI), logprobs=True)
_ALL_TOKENS = MappingProxyType({"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0})
DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            PLAIN,
            Dialect(
                "vllm",
                _EXTENDED,
                prefills_chat="flagged",
                running_usage=True,
                token_ids=True,
                logprobs=True,
                prompt_logprobs=True,
                neutral=_ALL_TOKENS,
                constraints=constrained.VLLM,
                tools="strictly",
                template_kwargs=True,
                salts=True,
                offers=frozenset({Feature.BAD_WORDS, Feature.TOKENIZE}),
            ),
            Dialect(
                "sglang",
                MappingProxyType(_SGLANG),
                prefills_chat="flagged",
                running_usage=True,
                logprobs=True,
                neutral=MappingProxyType({**_ALL_TOKENS, "top_k": -1}),
                constraints=constrained.SGLANG,
                template_kwargs=True,
            ),
            Dialect(
                "llama.cpp",
                MappingProxyType(
                    {**_OPENAI, **_same("top_k", "ignore_eos", "min_p"), "repetition_penalty": "repeat_penalty"}
                ),
                prefills_chat="plain",
                token_ids=True,
                logprobs=True,
                least_top_logprobs=1,
                neutral=MappingProxyType({"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}),
                constraints=constrained.LLAMA_CPP,
                template_kwargs=True,
            ),
            Dialect("ollama", MappingProxyType(_OPENAI)),
        )
    }
)
"""By the name that `server` of a backend takes."""

_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "library": "ollama"}


def dialect_of(owned_by: str) -> Dialect:
    """Return how to speak to the server whose model card says `owned_by`; one that is not known gets plain OpenAI."""
    return DIALECTS[_OWNERS.get(owned_by.lower(), "plain")]
