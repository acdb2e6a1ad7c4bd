"""What every test may use: the prepared SmolLM2 artifacts, free ports, and one thread for torch."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent

os.environ.setdefault("OVERSPILL_MODELS", str(REPOSITORY / ".overspill" / "models"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# One line a request is what a log is for; thousands of them hide what a test says.
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("overspill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("overspill")


@pytest.fixture(scope="session")
def models_root() -> Path:
    """The model store that `make test` prepared; missing artifacts fail, they never skip."""
    root = Path(os.environ["OVERSPILL_MODELS"])
    if not (root / "smollm2-135m").is_dir():
        pytest.fail(f"no prepared models in {root}: run `make models` first (or `make test`, which does)")
    return root


@pytest.fixture
def free_port() -> int:
    """A loopback TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
