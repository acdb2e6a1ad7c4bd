"""What every test may use, and what the marks of a test allow it: the prepared models, other processes."""

from __future__ import annotations

import logging
import multiprocessing.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from router.base.build import build_of
from router.base.usage_reports import silence_usage_reports
from tests.support.fleet_rig import Broker
from tests.support.paths import REPOSITORY
from tests.support.ports import unused_port

os.environ.setdefault("OVERSPILL_MODELS", str(REPOSITORY / ".overspill" / "models"))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
silence_usage_reports()

# One line a request is what a log is for; thousands of them hide what a test says. rich takes a second for a traceback.
structlog.configure(
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        structlog.processors.KeyValueRenderer(key_order=["level", "event"]),
    ],
)

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("overspill", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("overspill"), max_examples=15)
settings.load_profile("overspill")

NOT_FAST = ("real_model", "broker", "live", "process", "slow")
MAY_START_PROCESSES = ("real_model", "broker", "live", "process")
NEEDS_REAL_MODEL = frozenset({"models_root", "stack"})
# What libraries ask of the system once, within milliseconds: the openai SDK its name, ctypes where a library is.
ASKED_BY_LIBRARIES = frozenset({"uname", "lsb_release", "ldconfig"})
PROCESS_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})


class _Running:
    """The test that runs now; None between tests and while tests are collected."""

    item: pytest.Item | None = None


def _refuse_process(event: str) -> None:
    item = _Running.item
    if item is not None and not any(item.get_closest_marker(mark) for mark in MAY_START_PROCESSES):
        pytest.fail(f"{item.nodeid} starts a process ({event}): mark it `process`, `broker`, `live` or `real_model`")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in PROCESS_EVENTS:
        return
    if event == "subprocess.Popen" and Path(os.fsdecode(arguments[0])).name in ASKED_BY_LIBRARIES:
        return
    _refuse_process(event)


def _watched(spawn: Callable[..., int]) -> Callable[..., int]:
    def watched(*arguments: Any) -> int:
        _refuse_process("multiprocessing")
        return spawn(*arguments)

    return watched


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out every test marked " + ", ".join(NOT_FAST))


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Begun in the background of a shell, it ignores Ctrl-C, and so would every program that a test interrupts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.addaudithook(_audit)
    # The only way to a new process that raises no audit event.
    multiprocessing.util.spawnv_passfds = _watched(multiprocessing.util.spawnv_passfds)  # type: ignore[attr-defined]
    if config.getoption("--fast"):
        settings.load_profile("fast")
        os.environ["OVERSPILL_MODELS"] = "/nonexistent/models-in-a-fast-run"


def _heed_the_build(items: list[pytest.Item]) -> None:
    """Skip what a compiled router cannot show, and run nothing where what is compiled is not what stands there."""
    build = build_of()
    if build.changed:
        changed = ", ".join(build.changed)
        raise pytest.UsageError(f"compiled from other sources: {changed}; run: make compiled, or make interpreted")
    for item in items:
        if build.compiled and item.get_closest_marker("interpreted") is not None:
            item.add_marker(pytest.mark.skip("the router is compiled"))


def pytest_report_header() -> str:
    return f"router: {build_of().name}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _heed_the_build(items)
    for item in items:
        asked = NEEDS_REAL_MODEL.intersection(getattr(item, "fixturenames", ()))
        if asked and item.get_closest_marker("real_model") is None:
            raise pytest.UsageError(f"{item.nodeid} uses {', '.join(sorted(asked))}: mark it `real_model`")
    if config.getoption("--fast"):
        left_out = [item for item in items if any(item.get_closest_marker(mark) for mark in NOT_FAST)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _Running.item = item
    yield
    _Running.item = None


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are() -> Iterator[None]:
    """A test that leaves other logs behind blinds every later one that looks at what is logged: it fails itself."""
    before = structlog.get_config()
    processors = [*before["processors"]]
    yield
    if structlog.get_config() != before or before["processors"] != processors:
        before["processors"][:] = processors
        structlog.configure(**before)
        pytest.fail("it leaves structlog configured otherwise: use `logs.at_least`, or another process")


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
    return unused_port()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """A running mosquitto that keeps nothing."""
    folder = tmp_path / "broker"
    folder.mkdir()
    with Broker(folder) as running:
        yield running
