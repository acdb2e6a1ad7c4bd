"""What of a decision the tenant is told whose request it was: every replica by its name alone."""

from __future__ import annotations

import msgspec

from router.decisions.line import CandidateRow, Decision
from router.values.replica import without_address

_NAMED_IN_EVENTS = ("replica", "beside")


def without_addresses(decision: Decision) -> Decision:
    """Return a decision that tells of servers by their names."""
    chosen = decision.chosen
    return msgspec.structs.replace(
        decision,
        candidates=tuple([_row(row) for row in decision.candidates]),
        chosen=chosen and msgspec.structs.replace(chosen, replica=without_address(chosen.replica)),
        events=tuple([_event(event) for event in decision.events]),
    )


def _row(row: CandidateRow) -> CandidateRow:
    return msgspec.structs.replace(row, replica=without_address(row.replica), endpoint=None, device=None)


def _event(event: dict[str, object]) -> dict[str, object]:
    return {key: without_address(str(value)) if key in _NAMED_IN_EVENTS else value for key, value in event.items()}
