"""What whoever asked for a path that is not served probably meant: most of them gave their client another base URL."""

from __future__ import annotations

import re
from collections.abc import Iterable

_STATELESS = "nothing is kept between calls here: send the whole conversation to /v1/chat/completions or /v1/responses"
_OTHERS = (
    ("/api/", "Ollama's own API is not served: give an OpenAI client the base URL that ends in /v1"),
    ("/v1/messages/batches", "many requests in one file are run by /v1/batches, in OpenAI's form"),
    ("/v1/messages/", "of Anthropic's API /v1/messages, /v1/messages/count_tokens and /v1/models are served"),
    ("/v1/complete", "Anthropic's older API is not served: send the conversation to /v1/messages"),
    ("/v1/responses/input_tokens", "tokens are counted by /tokenize"),
    ("/v1/responses/compact", "conversations are not shortened here: send less of them"),
    ("/v1/responses/", _STATELESS),
    ("/v1/conversations", _STATELESS),
    ("/v1/assistants", _STATELESS),
    ("/v1/threads", _STATELESS),
    ("/v1/chat/completions/", _STATELESS),
    ("/v1/realtime", "speech in real time is not served: send text to /v1/responses, with `stream`"),
    ("/v1/vector_stores", "no documents are kept here: get vectors at /v1/embeddings, and keep them yourself"),
)
_BASE_OF_OPENAI = "the base URL of an OpenAI client ends in /v1, once, with no slash behind it"
_BASE_OF_ANTHROPIC = "Anthropic's SDKs take the base URL without /v1"
_BELOW = "the APIs are below /v1 and /v2"


def remedy(path: str, served: Iterable[str]) -> str:
    """Return what to do about a path that is not served.

    Args:
        served: the paths that are, those with names in braces too.
    """
    asked, known = re.sub(r"/{2,}", "/", path).rstrip("/"), {each for each in served if "{" not in each}
    if (told := dict(_OTHERS).get(asked)) is not None:
        return told
    for meant in sorted((each for each in known if each.startswith("/v1/")), key=len, reverse=True):
        end = meant.removeprefix("/v1")
        base = asked.removesuffix(end)
        if asked.endswith(end) and (not base.startswith("/v1/") or base.endswith("/v1") or base in known):
            return f"{meant} is one; {_BASE_OF_ANTHROPIC if meant.startswith('/v1/messages') else _BASE_OF_OPENAI}"
    return next((told for begin, told in _OTHERS if asked.startswith(begin)), _BELOW)
