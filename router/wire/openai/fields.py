"""What the bodies of chat and of completions have in common. The rest of each is in `chat` and `completion`.

Every known field is typed strictly: a wrong type or a value out of range is an `InvalidRequest` whose `param` is the
field's path (`messages[1].content[0].text`). A known field that would change the answer and is not served here
(`tools`, `logprobs`, `n` > 1, …) is refused by name, never dropped. So is a promise that belongs into a header
(`locality`). Fields nobody knows are tolerated, as clients of OpenAI-compatible servers expect: SDKs send vendor extras
to every base URL.

Extensions: vLLM's `top_k`, `min_p`, `min_tokens`, `stop_token_ids`, `allowed_token_ids`, `repetition_penalty`,
`ignore_eos`, `continue_final_message`, `add_generation_prompt` and `stream_options.continuous_usage_stats`; `priority`
(higher is better, as in `x-overspill-priority`); and `overspill_continuation`, text of a completion that was already
emitted and is to be continued.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.values.prompt import Prompt
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.wire.openai.constraints import ConstraintFields, constraint_of
from router.wire.openai.unserved import Rule, only

MAX_CHOICES = 128
"""Of one call: each is a request of the router, with a place of its own in this tier."""

_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Fields(ConstraintFields, frozen=True, kw_only=True):
    """The fields of both."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    service_tier: str | None = None
    priority: _Int32 | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    # Known, and served only at the value that changes nothing.
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


UNSERVED: tuple[Rule, ...] = (
    ("use_beam_search", only(False), "beam search is not offered: leave it out"),
    ("length_penalty", only(1, 1.0), "beam search is not offered: leave it out"),
    ("early_stopping", only(False), "beam search is not offered: leave it out"),
    ("include_stop_str_in_output", only(False), "answers end before a stop string: leave it out"),
    ("skip_special_tokens", only(True), "special tokens are no text: leave it out"),
    ("spaces_between_special_tokens", only(True), "special tokens are no text: leave it out"),
    ("truncate_prompt_tokens", only(), "a prompt is answered whole or refused: shorten it yourself"),
    ("prompt_logprobs", only(), "send `echo`: true with `logprobs` to /v1/completions"),
    ("return_token_ids", only(False), "ids are not returned: send the text to /tokenize"),
    ("return_tokens_as_token_ids", only(False), "ids are not returned: send the text to /tokenize"),
    ("logits_processors", only([]), "code is not taken over HTTP: use `logit_bias`"),
    ("typical_p", only(1, 1.0), "not applied by this server: use `top_p` or `min_p`"),
    ("mirostat", only(0), "not applied by this server: use `top_p` or `min_p`"),
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
        priority=raw.priority,
        continuation=continuation,
        n=raw.n or 1,
    )
