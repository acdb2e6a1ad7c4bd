"""A stage's function in a process of its own: what crashes or leaks there takes nothing else along.

The process is begun anew after its end. A batch on which it ended counts as failed like any other, so it is halved
until the input is found that ends processes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from models.pipelines.set_apart import ProcessEnded
from models.pipelines.stage import Opens, Work
from router.base.errors import ConfigError, OverspillError, ReplicaBroken, ReplicaUnreachable, in_words

_JOIN_S = 5.0
_OPENED = "opened"
_LOOKS = (0.9, 0.1)  # shares of the time that it may take


class ProcessWork:
    """A function of a batch in a child process; called by one thread at a time, and ended by any.

    Args:
        open: a picklable maker of the function; runs in the child.
        timeout_s: a batch that takes longer has failed, and its process ends; 0 waits for ever.
        start_timeout_s: the same of making the function.
    """

    def __init__(
        self,
        name: str,
        open: Opens,  # noqa: A002 - the stage's own word
        timeout_s: float = 0.0,
        start_timeout_s: float = 0.0,
    ) -> None:
        self._name = name
        self._open = open
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._over = False
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Of the child, None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin the child, and wait until its function is made.

        Raises:
            OverspillError: it cannot be made, or not any more; says why.
        """
        context = multiprocessing.get_context("spawn")
        with self._lock:
            if self._over:
                raise self._unloaded()
            ours, theirs = context.Pipe()
            self._pipe = ours
            self._process = context.Process(target=_serve, args=(theirs, self._open), name=self._name, daemon=True)
            self._process.start()
            theirs.close()
        if _silent(ours, self._start_timeout_s):
            self._kill()
            raise ReplicaUnreachable(f"{self._name}: it was not ready within {self._start_timeout_s:g} s")
        told = self._received()
        if told != _OPENED:
            self.close()
            raise told if isinstance(told, OverspillError) else ConfigError(f"{self._name}: {in_words(told)}")

    def __call__(self, batch: list[Any]) -> Sequence[Any]:
        data = pickle.dumps(batch, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self._send(data)
        except OSError:  # it ended before it had the batch, whose inputs are not to blame
            self.close()
            self._send(data)
        if self._pipe is not None and _silent(self._pipe, self._timeout_s):
            self._kill()
            raise ProcessEnded(f"it did not return within {self._timeout_s:g} s, and its process was ended")
        results = self._received()
        if isinstance(results, BaseException):
            raise results
        return results  # type: ignore[no-any-return]

    def _send(self, data: bytes) -> None:
        if self._process is None:
            self.start()
        if self._pipe is None:
            raise self._unloaded()
        self._pipe.send_bytes(data)

    def _received(self) -> Any:
        pipe, process = self._pipe, self._process
        if pipe is None or process is None:  # it was ended meanwhile
            return self._unloaded()
        try:
            return pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own child's
        except (EOFError, OSError):
            if self._over:
                return self._unloaded()
            process.join(_JOIN_S)
            code = process.exitcode
            self.close()
            return ProcessEnded(f"the process of {self._name} ended with code {code}")

    def _unloaded(self) -> ReplicaBroken:
        return ReplicaBroken(f"{self._name}: it is being unloaded")

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self.close()

    def end(self) -> None:
        """End the child for good: whoever still computes in it, in another thread, begins no other one."""
        with self._lock:
            self._over = True
        self.close()

    def close(self) -> None:
        """End the child: it is asked to, and killed if it does not. The next batch begins another one."""
        with self._lock:
            process, self._process = self._process, None
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is not None:
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _silent(pipe: Connection, limit_s: float) -> bool:
    """Wait until a child has said something; returns whether it did not in time. 0 bounds nothing.

    Two looks must agree on that: where the whole host stood still, the child had no time either until the second.
    """
    try:
        return bool(limit_s) and not any(pipe.poll(share * limit_s) for share in _LOOKS)
    except OSError:  # it was ended meanwhile, which whoever reads is told
        return False


def _serve(pipe: Connection, open: Opens) -> None:  # noqa: A002
    """Make the function, and call it for every batch until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's: it ends its children in order
    work: Work
    try:
        work = open()
    except BaseException as error:  # noqa: BLE001 - told to the parent, which knows what it means
        _send(pipe, error)
        os._exit(1)
    _send(pipe, _OPENED)
    with contextlib.suppress(EOFError, OSError):
        while True:
            batch = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own parent's
            try:
                results: Any = list(work(batch))
            except Exception as error:  # noqa: BLE001 - the batch's failure, for the parent to divide
                results = error
            _send(pipe, results)


def _send(pipe: Connection, value: Any) -> None:
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)  # noqa: S301 - what cannot be read back is told in words
    except Exception:  # noqa: BLE001 - an exception of any library
        data = pickle.dumps(RuntimeError(in_words(value) if isinstance(value, BaseException) else repr(type(value))))
    pipe.send_bytes(data)
