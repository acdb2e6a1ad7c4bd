"""Limits a minute, as OpenAI's API tells them with each reply."""

from __future__ import annotations

_MINUTE_S = 60
_HOUR_S = 3600


def rate_limit_headers(kind: str, limit: int, remaining: int, reset_s: float) -> list[tuple[str, str]]:
    """Return what is left of a limit; `kind` is `requests` or `tokens`."""
    return [
        (f"x-ratelimit-limit-{kind}", str(limit)),
        (f"x-ratelimit-remaining-{kind}", str(remaining)),
        (f"x-ratelimit-reset-{kind}", duration(reset_s)),
    ]


def duration(length_s: float) -> str:
    """Write seconds as that API does: `12ms`, `1.5s`, `6m0s`."""
    if length_s < 1.0:
        return f"{round(length_s * 1000)}ms"
    if length_s < _MINUTE_S:
        return f"{length_s:.3f}".rstrip("0").rstrip(".") + "s"
    hours, rest = divmod(round(length_s), _HOUR_S)
    minutes, seconds = divmod(rest, _MINUTE_S)
    return f"{hours}h{minutes}m{seconds}s" if hours else f"{minutes}m{seconds}s"
