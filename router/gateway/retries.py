"""How a request shows that it was sent before: by its client's own word, or by asking for the same again."""

from __future__ import annotations

from collections.abc import Mapping

RETRY_COUNT = "x-stainless-retry-count"
"""What the client libraries of OpenAI, and all that are generated alike, count their retries in."""
IDEMPOTENCY_KEY = "idempotency-key"

_EDGE_BYTES = 2048  # of a body, at both ends: to hash all of a large one would cost what it is to spare


def says_retry(headers: Mapping[str, str]) -> bool:
    """Whether a client says that it sends a request again."""
    return headers.get(RETRY_COUNT, "0") not in {"0", ""}


def fingerprint(headers: Mapping[str, str], body: bytes) -> int:
    """Return what is equal for requests that ask for the same; keyed, so that nobody can make two alike on purpose."""
    key = headers.get(IDEMPOTENCY_KEY)
    return hash((len(body), body[:_EDGE_BYTES], body[-_EDGE_BYTES:]) if key is None else key)
