"""The body of /v1/completions → `ApiRequest`."""

from __future__ import annotations

from typing import Any

import msgspec

from router.base.errors import InvalidRequest
from router.values.request import ApiRequest, Prompt, TextPrompt, TokenPrompt
from router.wire.body import decode_json
from router.wire.names import refuse_fields
from router.wire.openai.fields import UNSERVED, Fields, request_of
from router.wire.openai.sampling import sampling_of
from router.wire.openai.unserved import Rule, only, refuse_unserved
from router.wire.sampling import COMPLETION_MAX_TOKENS


class _Completion(Fields, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]
    overspill_continuation: str | None = None
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


_UNSERVED: tuple[Rule, ...] = (
    *UNSERVED,
    ("best_of", only(1), "one choice is generated per request: leave `best_of` out or set it to 1"),
    ("echo", only(False), "the prompt is not echoed: leave `echo` out"),
    ("suffix", only(""), "filling in the middle is not offered: leave `suffix` out"),
)

_decoder = msgspec.json.Decoder(_Completion)
COMPLETION_BODY = _Completion  # what the description of the API shows


def decode_completion(body: bytes) -> ApiRequest:
    """Decode the body of /v1/completions.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    raw = decode_json(_decoder, body)
    refuse_fields(body, _Completion.__struct_fields__)
    refuse_unserved(raw, _UNSERVED)
    sampling = sampling_of(raw, COMPLETION_MAX_TOKENS)
    return request_of(raw, _prompt(raw.prompt), raw.overspill_continuation or "", sampling)


def _prompt(raw: str | list[int | str | list[int]]) -> Prompt:
    if isinstance(raw, list) and len(raw) == 1 and not isinstance(raw[0], int):
        raw = raw[0]  # type: ignore[assignment]  # a batch of one: text or token ids
    if not raw:
        raise InvalidRequest("`prompt` is empty: send text, or at least one token id", param="prompt")
    if isinstance(raw, str):
        return TextPrompt(raw)
    ids = []
    for index, token_id in enumerate(raw):
        if not isinstance(token_id, int):
            raise InvalidRequest(
                "`prompt`: one prompt per request: send a string or one list of token ids", param="prompt"
            )
        if not 0 <= token_id < 2**31:
            raise InvalidRequest(f"`prompt[{index}]`: {token_id} is no token id", param=f"prompt[{index}]")
        ids.append(token_id)
    return TokenPrompt(tuple(ids))
