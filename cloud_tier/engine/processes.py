"""The processes of one engine group, as their parent sees them.

Every rank holds one end of a socket pair whose other end is here. Whichever side dies, the other sees its end of the
stream close at once: no process id is polled, and no rank outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import cloud_tier
from cloud_tier.engine.messages import LENGTH, MESH_LIMIT_BYTES, Setup, ToParent, frame
from cloud_tier.engine.protocol import EngineConfig

_SPINS = "10000"
_SOURCE_ROOT = Path(cloud_tier.__file__).resolve().parents[1]
_MESH_BUFFER_BYTES = 4 * MESH_LIMIT_BYTES  # the kernel counts its bookkeeping in, and cuts this to its own limit


@dataclass(slots=True)
class RankProcess:
    """One running rank and the parent's end of its socket."""

    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def messages(self, decoder: msgspec.msgpack.Decoder[ToParent]) -> AsyncIterator[ToParent]:
        """Yield what the rank sends until it ends."""
        while True:
            try:
                (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
                body = await self.reader.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield decoder.decode(body)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; a rank that is gone is noticed by `messages`."""
        self.writer.write(frame(message))


class RankProcesses:
    """All ranks of one engine, rank 0 first. `start` them, and `end` them always."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="overspill-engine-"))
        self._spawned: list[subprocess.Popen[bytes]] = []
        self.ranks: list[RankProcess] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, rank 0 first."""
        return tuple(rank.process.pid for rank in self.ranks)

    async def start(self) -> None:
        """Start every rank and tell it what to run."""
        ranks = range(self._config.tensor_parallel)
        with contextlib.ExitStack() as to_close:

            def pair(buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
                ends = socket.socketpair()
                for end in ends:
                    to_close.callback(end.close)
                    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if buffer_bytes else ():
                        end.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
                return ends

            fds: list[list[tuple[str, socket.socket]]] = [[] for _ in ranks]
            for rank in ranks[1:]:
                leader, follower = pair()
                fds[0].append(("peer", leader))
                fds[rank].append(("leader", follower))
            if self._config.device == "cpu":
                for low, high in itertools.combinations(ranks, 2):
                    ends = pair(_MESH_BUFFER_BYTES)
                    fds[low].append(("mesh", ends[0]))
                    fds[high].append(("mesh", ends[1]))
            for rank in ranks:
                # The stream and the child own copies of their ends: the stack closes these, whatever goes wrong.
                ours, theirs = pair()
                process = self._spawn([("parent", theirs), *fds[rank]])
                reader, writer = await asyncio.open_unix_connection(sock=ours.dup())
                self.ranks.append(RankProcess(process, reader, writer))
                self.ranks[-1].send(Setup(self._config, rank, str(self._folder / "rendezvous")))

    async def end(self) -> None:
        """Kill what still runs, reap all, and close the sockets."""
        for process in self._spawned:
            process.kill()
        for process in self._spawned:
            await asyncio.to_thread(process.wait)
        for rank in self.ranks:
            rank.writer.close()
            with contextlib.suppress(OSError):
                await rank.writer.wait_closed()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, sockets: list[tuple[str, socket.socket]]) -> subprocess.Popen[bytes]:
        """Start a rank that inherits these sockets, each under its role."""
        environment: dict[str, Any] = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_SOURCE_ROOT), *filter(None, [environment.get("PYTHONPATH", "")])]
        )
        environment["OMP_NUM_THREADS"] = str(self._config.threads[-1])
        # Threads look for each other for some hundred microseconds, then leave their core to the neighbours, the
        # tier's own event loop among them: one that slept at once took longer to wake than most products take.
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
        if self._config.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._config.gpus)
        options = [f"--{role}-fd={end.fileno()}" for role, end in sockets]
        process = subprocess.Popen(
            [sys.executable, "-m", "cloud_tier.engine.worker", f"--parent-pid={os.getpid()}", *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[end.fileno() for _, end in sockets],
        )
        self._spawned.append(process)
        return process
