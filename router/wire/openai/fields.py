"""What bodies that ask for text have in common. The rest of each is in `chat`, `completion` and `responses`.

Every known field is typed strictly: a wrong type or a value out of range is an `InvalidRequest` whose `param` is the
field's path (`messages[1].content[0].text`). A known field that would change the answer and is not served here
(`tools`, `logprobs`, `n` > 1, …) is refused by name, never dropped. So is a promise that belongs into a header
(`locality`). Fields nobody knows are tolerated, as clients of OpenAI-compatible servers expect: SDKs send vendor extras
to every base URL.

Extensions: vLLM's `top_k`, `min_p`, `min_tokens`, `stop_token_ids`, `allowed_token_ids`, `repetition_penalty`,
`ignore_eos`, `continue_final_message`, `add_generation_prompt`, `cache_salt`, `stream_options.continuous_usage_stats`;
`priority` (higher is better, as in `x-overspill-priority`); and, between tiers, `overspill_continuation`, text of a
completion that was already emitted and is to be continued, and `stream_options.overspill_brief` (see `brief`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.values.constraint import Constraint, ConstraintKind
from router.values.prompt import Prompt
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.values.tool_calls import Tools
from router.wire.openai.constraints import ConstraintFields, constraint_of
from router.wire.openai.unserved import Rule, only

MAX_CHOICES = 128
"""Of one call: each is a request of the router, with a place of its own in this tier."""

_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    overspill_brief: bool | None = None


class Fields(ConstraintFields, frozen=True, kw_only=True):
    """The fields of all of them."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    service_tier: str | None = None
    priority: _Int32 | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    # Known, and served only at the value that changes nothing.
    moderation: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    include_stop_str_in_output: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    logits_processors: Any = None
    typical_p: Any = None
    mirostat: Any = None
    # Of newer vLLMs.
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    logprob_token_ids: Any = None
    return_token_offsets: Any = None
    return_prompt_text: Any = None
    mm_processor_kwargs: Any = None
    guided_whitespace_pattern: Any = None
    watermarking: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    # Of SGLang and llama.cpp.
    custom_logit_processor: Any = None
    lora_path: Any = None
    no_stop_trim: Any = None
    return_hidden_states: Any = None
    n_predict: Any = None
    repeat_penalty: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    dynatemp_range: Any = None
    top_n_sigma: Any = None
    samplers: Any = None
    n_probs: Any = None
    lora: Any = None
    t_max_predict_ms: Any = None
    thinking_budget_tokens: Any = None


_THOUGHTS = "thoughts are not counted here: bound the whole answer with `max_tokens`"
_HANDED_OVER = "a KV cache is handed over between servers behind this tier alone: leave it out"

UNSERVED: tuple[Rule, ...] = (
    ("moderation", only(), "nothing is judged here: leave it out, and judge the answer yourself"),
    ("use_beam_search", only(False), "beam search is not offered: leave it out"),
    ("length_penalty", only(1, 1.0), "beam search is not offered: leave it out"),
    ("early_stopping", only(False), "beam search is not offered: leave it out"),
    ("include_stop_str_in_output", only(False), "answers end before a stop string: leave it out"),
    ("skip_special_tokens", only(True), "special tokens are no text: leave it out"),
    ("spaces_between_special_tokens", only(True), "special tokens are no text: leave it out"),
    ("truncate_prompt_tokens", only(-1), "a prompt is answered whole or refused: shorten it yourself"),
    ("prompt_logprobs", only(), "send `echo`: true with `logprobs` to /v1/completions"),
    ("return_token_ids", only(False), "ids are not returned: send the text to /tokenize"),
    ("return_tokens_as_token_ids", only(False), "ids are not returned: send the text to /tokenize"),
    ("logits_processors", only([]), "code is not taken over HTTP: use `logit_bias`"),
    ("typical_p", only(1, 1.0), "not applied by this server: use `top_p` or `min_p`"),
    ("mirostat", only(0), "not applied by this server: use `top_p` or `min_p`"),
    ("thinking_token_budget", only(-1), _THOUGHTS),
    ("thinking_budget_tokens", only(-1), _THOUGHTS),
    ("repetition_detection", only(), "not applied by this server: use `repetition_penalty` or `max_tokens`"),
    ("logprob_token_ids", only([]), "log probabilities are told of the likeliest tokens: use `logprobs`"),
    ("return_token_offsets", only(False), "offsets are not returned: `logprobs` of /v1/completions tell them"),
    ("return_prompt_text", only(False), "prompts are not returned: send `echo` to /v1/completions"),
    ("mm_processor_kwargs", only({}), "images and sounds are read as the model's server does by itself: leave it out"),
    ("guided_whitespace_pattern", only(), "white space is that of JSON: leave it out"),
    ("watermarking", only(False), "answers are not marked: leave it out"),
    ("vllm_xargs", only({}), "what a vLLM's extensions are told is its operator's to say: leave it out"),
    ("kv_transfer_params", only({}), _HANDED_OVER),
    ("ec_transfer_params", only({}), _HANDED_OVER),
    ("custom_logit_processor", only(), "code is not taken over HTTP: use `logit_bias`"),
    ("lora_path", only(), "name the adapter as the `model`, where it is served"),
    ("no_stop_trim", only(False), "answers end before a stop string: leave it out"),
    ("return_hidden_states", only(False), "hidden states are not returned: leave it out"),
    ("n_predict", only(-1), "send `max_tokens`"),
    ("repeat_penalty", only(1, 1.0), "send `repetition_penalty`"),
    ("dry_multiplier", only(0, 0.0), "not applied by this server: use `repetition_penalty`"),
    ("xtc_probability", only(0, 0.0), "not applied by this server: use `min_p` or `temperature`"),
    ("dynatemp_range", only(0, 0.0), "not applied by this server: use `temperature`"),
    ("top_n_sigma", only(-1, -1.0), "not applied by this server: use `min_p`"),
    ("samplers", only(), "samplers are applied in a fixed order: leave it out"),
    ("n_probs", only(0), "send `logprobs`"),
    ("lora", only([]), "name the adapter as the `model`, where it is served"),
    ("t_max_predict_ms", only(0, -1), "send the header `x-overspill-deadline-ms`"),
)


def request_of(raw: Fields, prompt: Prompt, continuation: str, sampling: SamplingParams) -> ApiRequest:
    """Return the request that a body with these fields asks.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    options = raw.stream_options
    if options is not None and not raw.stream:
        raise InvalidRequest("`stream_options` is served together with `stream`: true only", param="stream_options")
    constraint = constraint_of(raw)
    return ApiRequest(
        model=raw.model,
        prompt=prompt,
        sampling=sampling if constraint is None else replace(sampling, constraint=constraint),
        stream=bool(raw.stream),
        include_usage=bool(options and options.include_usage),
        running_usage=bool(options and options.continuous_usage_stats),
        brief=bool(options and options.overspill_brief),
        priority=raw.priority,
        continuation=continuation,
        n=raw.n or 1,
        cache_salt=raw.cache_salt or "",
    )


def refuse_constraint_beside(tools: Tools | None, constraint: Constraint | None) -> None:
    """An answer that may call tools is JSON by a schema, or free: others leave no room for calls.

    Raises:
        InvalidRequest: naming the constraint that is neither.
    """
    if tools is None or not tools.callable or constraint is None or constraint.kind is ConstraintKind.JSON_SCHEMA:
        return
    raise InvalidRequest(
        f"`{constraint.param}`: an answer that may call `tools` is constrained by a JSON schema, or not at all",
        param=constraint.param,
    )
