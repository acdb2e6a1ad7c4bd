"""The body of /v1/completions → `ApiRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from router.base.errors import InvalidRequest
from router.values.prompt import Prompt, TextPrompt, TokenPrompt
from router.values.request import ApiRequest
from router.wire.body import decode_json
from router.wire.names import checked_field_names
from router.wire.openai.fields import MAX_CHOICES, UNSERVED, Fields, request_of
from router.wire.openai.sampling import TopLogprobs, sampling_of
from router.wire.openai.unserved import Unserved, only
from router.wire.sampling import COMPLETION_MAX_TOKENS, MAX_TOKEN_ID


class _Completion(Fields, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: TopLogprobs | bool | None = None
    echo: bool | None = None
    overspill_continuation: str | None = None
    best_of: Any = None
    suffix: Any = None
    add_special_tokens: Any = None
    prompt_embeds: Any = None


_UNSERVED = Unserved(
    *UNSERVED,
    ("best_of", only(1), "answers are not ranked: ask for `n` choices"),
    ("add_special_tokens", only(True), "send the prompt as token ids to leave them out"),
    ("prompt_embeds", only(), "prompts are text or token ids"),
    ("suffix", only(""), "filling in the middle is not offered: leave `suffix` out"),
)

_decoder = msgspec.json.Decoder(_Completion)
_FIELDS = frozenset(_Completion.__struct_fields__)
COMPLETION_BODY = _Completion  # what the description of the API shows


def decode_completion(body: bytes) -> ApiRequest:
    """Decode the body of /v1/completions.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_decoder, body)
    _UNSERVED.refuse(raw, checked_field_names(body, _FIELDS))
    prompts = _prompts(raw.prompt)
    if len(prompts) * (raw.n or 1) > MAX_CHOICES:
        raise InvalidRequest(
            f"`prompt`: {len(prompts)} prompts of {raw.n or 1} choices each, at most {MAX_CHOICES} together",
            param="prompt",
        )
    unanswered = raw.max_tokens == 0
    if unanswered and not raw.echo:
        raise InvalidRequest("`max_tokens`: 0 is served together with `echo`: true only", param="max_tokens")
    continuation = raw.overspill_continuation or ""
    if continuation and (raw.echo or len(prompts) > 1 or raw.n not in (None, 1)):
        raise InvalidRequest(
            "`overspill_continuation` goes on with one answer to one prompt, without `echo`",
            param="overspill_continuation",
        )
    logprobs = None if raw.logprobs is None or raw.logprobs is False else int(raw.logprobs)
    sampling = sampling_of(
        raw,
        1 if unanswered else COMPLETION_MAX_TOKENS,
        logprobs,
        prompt_logprobs=bool(raw.echo) and logprobs is not None,
    )
    return replace(
        request_of(raw, prompts[0], continuation, sampling),
        others=tuple(prompts[1:]),
        echo=bool(raw.echo),
        unanswered=unanswered,
    )


def _prompts(raw: str | list[int | str | list[int]]) -> list[Prompt]:
    """Return one prompt, or those of a list of texts or of lists of token ids."""
    if not raw:
        raise InvalidRequest("`prompt` is empty: send text, or at least one token id", param="prompt")
    if isinstance(raw, str) or isinstance(raw[0], int):
        return [_prompt(raw, "prompt")]
    return [_prompt(one, f"prompt[{index}]" if len(raw) > 1 else "prompt") for index, one in enumerate(raw)]


def _prompt(raw: int | str | Sequence[int | str | list[int]], at: str) -> Prompt:
    if isinstance(raw, int):
        raise InvalidRequest(f"`{at}`: a list holds token ids alone, or prompts alone", param=at)
    if not raw:
        raise InvalidRequest(f"`{at}` is empty: send text, or at least one token id", param=at)
    if isinstance(raw, str):
        return TextPrompt(raw)
    ids = []
    for index, token_id in enumerate(raw):
        if not isinstance(token_id, int):
            raise InvalidRequest(f"`{at}`: a list holds token ids alone, or prompts alone", param=at)
        if not 0 <= token_id < MAX_TOKEN_ID:
            raise InvalidRequest(f"`{at}[{index}]`: {token_id} is no token id", param=f"{at}[{index}]")
        ids.append(token_id)
    return TokenPrompt(tuple(ids))
