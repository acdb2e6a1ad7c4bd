"""What every Python client script is written with; it runs in that client's environment: the standard library alone.

A script makes one `Checks`, marks functions with `@checks.that("what a user needs")`, and ends with `checks.run()`,
which prints one JSON line for each: `{"check": …, "outcome": "pass" | "fail" | "not run", "reason": …, "took_s": …}`.
The server it talks to stands in the environment (`Server.from_environment`).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

Work = TypeVar("Work", bound=Callable[..., Any])

CHECK_LIMIT_S = 90.0
_NAMES_ERROR = re.compile(r"[\w.]*(Error|Exception)\b:?|.*Exception:")
REASON_CHARS = 400


class NotRunError(Exception):
    """A check that cannot be asked of this server; the message says why."""


@dataclass(frozen=True)
class Server:
    """The server under test, as the harness describes it.

    Attributes:
        name: `edge`, `cloud`, `vllm`, …
        url: without `/v1`.
        key: the bearer key that it wants.
        model, embeddings_model: names to ask for; of the second the server may be another one (`embeddings_url`).
        ranker, voice, viewer: models that rank texts (at `embeddings_url`), speak and hear, see; empty: there is none.
        grpc: `host:port`; empty where there is none.
        whole_model, stream_model: for KServe V2: who answers in one piece and who streams may be two.
        tokenizer: folder of the model's tokenizer in Hugging Face's form.
        context_tokens: the model's window.
        page_port: where a web page is served from: the origin that a server of ours allows.
        folder: for files of this run.
    """

    name: str
    url: str
    key: str
    model: str
    embeddings_url: str
    embeddings_model: str
    ranker: str
    voice: str
    viewer: str
    grpc: str
    whole_model: str
    stream_model: str
    tokenizer: Path
    context_tokens: int
    page_port: int
    folder: Path

    @classmethod
    def from_environment(cls) -> Server:
        told = json.loads(os.environ["COMPATIBILITY_SERVER"])
        return cls(**{**told, "tokenizer": Path(told["tokenizer"]), "folder": Path(told["folder"])})

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    def wants_embeddings(self) -> None:
        """Raise NotRunError where the server has no embedding model."""
        if not self.embeddings_model:
            raise NotRunError("this server has no embedding model")

    def wants(self, model: str, what: str) -> str:
        """Return one of its models; raises NotRunError where it has none that does so."""
        if not model:
            raise NotRunError(f"this server has no model that {what}")
        return model

    @property
    def ours(self) -> bool:
        """Whether it is an Overspill, whose own headers it knows."""
        return self.name not in {"vllm", "triton"}


@dataclass
class Checks:
    """The checks of one client.

    Attributes:
        packages: whose versions the table names.
        versions: those of other programs.
    """

    packages: tuple[str, ...]
    versions: dict[str, str] = field(default_factory=dict)
    found: list[tuple[str, Callable[..., Any]]] = field(default_factory=list)

    def that(self, what: str) -> Callable[[Work], Work]:
        def register(work: Work) -> Work:
            self.found.append((what, work))
            return work

        return register

    def run(self) -> None:
        """Run all in order, or those named on the command line; print a line each."""
        versions = {package: importlib.metadata.version(package) for package in self.packages} | self.versions
        self._print({"checks": [what for what, _ in self.found], "versions": versions})
        server = Server.from_environment()
        for what, work in self.found:
            if sys.argv[1:] and not any(word in what for word in sys.argv[1:]):
                continue
            began_s = time.perf_counter()
            outcome, reason = _tried(work, server)
            self._print(
                {"check": what, "outcome": outcome, "reason": reason, "took_s": round(time.perf_counter() - began_s, 2)}
            )

    @staticmethod
    def _print(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)


def _tried(work: Callable[..., Any], server: Server) -> tuple[str, str]:
    try:
        with _limited(CHECK_LIMIT_S):
            if inspect.iscoroutinefunction(work):
                asyncio.run(work(server))
            else:
                work(server)
    except NotRunError as why:
        return "not run", str(why)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a client raises is what the row tells
        return "fail", _told(error)
    return "pass", ""


def _told(error: BaseException) -> str:
    """Return what failed in a line: of an assertion without words, which one."""
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and error.__traceback__ is not None:
        frame = error.__traceback__
        while frame.tb_next is not None:
            frame = frame.tb_next
        source = Path(frame.tb_frame.f_code.co_filename).read_text(encoding="utf-8").splitlines()
        line = source[frame.tb_lineno - 1].strip()
        text = text or line
    return f"{type(error).__name__}: {text}"[:REASON_CHARS]


@contextlib.contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def finished(argv: Sequence[str], **options: Any) -> str:
    """Run a command to its end, and return what it printed.

    Raises:
        AssertionError: it failed; with the first line of what it said that names an error, or the last one.
    """
    told = {"capture_output": True, "text": True, "timeout": CHECK_LIMIT_S - 5, **options}
    done = subprocess.run(argv, check=False, **told)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    named = [line for line in lines if _NAMES_ERROR.match(line)]
    told_last = lines[-1] if lines else "it said nothing"
    assert done.returncode == 0, f"status {done.returncode}: {named[0] if named else told_last}"
    return str(done.stdout)


@dataclass
class Pieces:
    """What a stream brought, and when: an answer that comes in one piece at its end is no stream."""

    texts: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def add(self, text: str | None) -> None:
        if text:
            self.texts.append(text)
            self.times_s.append(time.perf_counter())

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def came_over_time(self, at_least: int = 4) -> None:
        """Assert that there were several pieces, and some time between the first and the last.

        Raises:
            AssertionError: with what came instead.
        """
        spread_s = self.times_s[-1] - self.times_s[0] if self.times_s else 0.0
        told = f"{len(self.texts)} pieces within {spread_s * 1e3:.0f} ms"
        if len(self.texts) < at_least or spread_s < 0.02:
            raise AssertionError(f"a stream of {told}")


def refused(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """Return the error that the call is refused with.

    Raises:
        AssertionError: it was served.
    """
    try:
        reply = call()
    except kind as error:
        return error
    raise AssertionError(f"served, where {kind.__name__} was due: {str(reply)[:200]}")
