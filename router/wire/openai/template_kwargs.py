"""`chat_template_kwargs`: what a caller tells the model's chat template beside the turns, such as `enable_thinking`."""

from __future__ import annotations

from typing import Any

import orjson

from router.base.errors import InvalidRequest

_NAME = "chat_template_kwargs"
_MAX_BYTES = 4096
_TOLD_OTHERWISE = frozenset(
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "bos_token",
        "eos_token",
        "chat_template",
        "tokenize",
    ]
)
"""What the body says elsewhere, or the model's files do; vLLM refuses them here, too."""


def template_kwargs_of(raw: dict[str, Any] | None) -> bytes:
    """Return the variables as a JSON object; empty where there are none.

    Raises:
        InvalidRequest: one of them is told elsewhere, or they are too large, or nest too deeply.
    """
    if not raw:
        return b""
    taken = sorted(_TOLD_OTHERWISE & raw.keys())
    if taken:
        name = f"{_NAME}.{taken[0]}"
        raise InvalidRequest(f"`{name}`: the template has it already: leave it out", param=name)
    try:
        written = orjson.dumps(raw, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:  # numbers of more than 64 bits, or more than 250 levels
        raise InvalidRequest(f"`{_NAME}`: {error}", param=_NAME) from None
    if len(written) > _MAX_BYTES:
        raise InvalidRequest(f"`{_NAME}`: {len(written)} bytes of JSON, at most {_MAX_BYTES} are read", param=_NAME)
    return written
