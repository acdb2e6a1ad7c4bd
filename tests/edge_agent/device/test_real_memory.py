"""What an agent holds in memory as a user would start it, with the INT8 model as it is shipped."""

from __future__ import annotations

import pytest

from benchmarks.edge_memory import LIMIT_ANSWERED_MB, LIMIT_IDLE_MB, QUESTION, Daemon

VARIANT = "smollm2-135m-int8"


@pytest.mark.real_model
@pytest.mark.usefixtures("models_root")
def test_memory_stays_within_what_is_promised() -> None:
    with Daemon([], []) as daemon:
        assert daemon.row("idle").rss_mb <= LIMIT_IDLE_MB
    with Daemon([VARIANT], [VARIANT]) as daemon:
        assert "Paris" in daemon.ask(QUESTION, VARIANT)
        assert daemon.row("answered").rss_mb <= LIMIT_ANSWERED_MB
