"""Which part of a prompt a replica is expected to hold computed: the turns of its session that it served before."""

from __future__ import annotations

from collections import OrderedDict

_SESSIONS_KEPT = 4096
_GAIN = 0.2
# A cache keeps what is used; half of the prefixes that nobody asked for in ten minutes are taken to be evicted.
_HALF_LIFE_S = 600.0


class PrefixHits:
    """Learns from the `cached_tokens` of first chunks; a replica that never tells any is expected to cache nothing."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, tuple[str, int, float]] = OrderedDict()
        self._kept_share: dict[str, float] = {}
        self._any_share: dict[str, float] = {}

    def expected(self, replica_id: str, session: str | None, prompt_tokens: int, now_s: float) -> int:
        """Return how many of the prompt's tokens the replica should hold, less than all of them."""
        share = self._any_share.get(replica_id, 0.0)
        hit = share * prompt_tokens
        known = self._sessions.get(session) if session else None
        if known is not None and known[0] == replica_id:
            kept = self._kept_share.get(replica_id, 0.0) * 0.5 ** ((now_s - known[2]) / _HALF_LIFE_S)
            hit = max(hit, kept * min(known[1], prompt_tokens))
        return max(0, min(int(hit), prompt_tokens - 1))

    def served(self, replica_id: str, session: str | None, tokens: int, now_s: float) -> None:
        """Note how many tokens, prompt and answer, a replica has computed for a session."""
        if not session:
            return
        self._sessions[session] = (replica_id, tokens, now_s)
        self._sessions.move_to_end(session)
        if len(self._sessions) > _SESSIONS_KEPT:
            self._sessions.popitem(last=False)

    def observe(self, replica_id: str, session: str | None, prompt_tokens: int, cached_tokens: int) -> None:
        """Learn from a first chunk, before `served` is told of the same request."""
        known = self._sessions.get(session) if session else None
        if known is not None and known[0] == replica_id:
            _move(self._kept_share, replica_id, cached_tokens / max(min(known[1], prompt_tokens), 1))
        else:
            _move(self._any_share, replica_id, cached_tokens / max(prompt_tokens, 1))

    def forget(self, replica_id: str) -> None:
        """A replica is gone, and what it held with it."""
        self._kept_share.pop(replica_id, None)
        self._any_share.pop(replica_id, None)


def _move(shares: dict[str, float], name: str, share: float) -> None:
    before = shares.get(name, 0.0)
    shares[name] = before + _GAIN * (min(max(share, 0.0), 1.0) - before)
