"""One rank of an engine, in a process of its own: `python -m cloud_tier.engine.worker`, started by `processes`.

Rank 0 schedules, samples and talks to the parent; the others run the steps they are told. A rank ends when it is told
to, when whoever tells it is gone (its channel ends), and at the latest when the kernel sees its parent die.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from cloud_tier.engine.inbox import Inbox
from cloud_tier.engine.messages import (
    Add,
    Channel,
    Compute,
    Failed,
    LimitLines,
    Loaded,
    Quit,
    Ready,
    Setup,
    Step,
    ToPeer,
    ToRank0,
)
from cloud_tier.engine.protocol import EngineConfig, EngineInfo
from router.base.clock import MonotonicClock
from router.base.errors import ConfigError, OverspillError, in_words

if TYPE_CHECKING:
    from cloud_tier.engine.core import EngineCore
    from cloud_tier.engine.model import Computed, Model

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run one rank until it is told to stop; return the exit status."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--parent-pid", type=int, required=True)
    arguments.add_argument("--parent-fd", type=int, required=True)
    arguments.add_argument(
        "--peer-fd", type=int, action="append", default=[], help="rank 0: a socket to each other rank"
    )
    arguments.add_argument("--mesh-fd", type=int, action="append", default=[], help="a socket to every other rank")
    arguments.add_argument("--leader-fd", type=int, help="other ranks: the socket to rank 0")
    options = arguments.parse_args()
    _end_with(options.parent_pid)
    _log_to_stderr()
    log = structlog.get_logger("cloud_tier.engine")
    parent = _channel(options.parent_fd, ToRank0)
    try:
        setup: Setup = parent.receive()
        rank = _Rank(setup, options.mesh_fd)
        parent.send(Loaded(rank.device))
        if options.leader_fd is None:
            rank.lead(parent, [_channel(fd, ToPeer) for fd in options.peer_fd])
        else:
            rank.follow(_channel(options.leader_fd, ToPeer))
    except OverspillError as error:
        parent.send(Failed(type(error).__name__, error.message))
        return 3
    except (EOFError, ConnectionError) as error:
        log.warning("engine rank ends: a peer is gone", error=str(error))
        return 4
    except Exception as error:
        log.exception("engine rank ends: it is broken")
        parent.send(Failed(type(error).__name__, str(error)))
        return 5
    return 0


def _log_to_stderr() -> None:
    """Tracebacks are plain: local variables hold prompts and whole tensors."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    stamp = structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=True)
    structlog.configure(
        processors=[structlog.processors.add_log_level, stamp, renderer],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _end_with(parent_pid: int) -> None:
    """Die with the parent, and leave the terminal's and the service manager's signals to it: it drains first."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(4)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _channel(fd: int, messages: Any) -> Channel:
    return Channel(socket.socket(fileno=fd), msgspec.msgpack.Decoder(messages))


class _Rank:
    """A rank with its weights loaded and its group joined."""

    def __init__(self, setup: Setup, mesh_fds: list[int]) -> None:
        self._config = setup.config
        self._model, self._context_tokens = load(setup, mesh_fds)
        self._draft = load_draft(self._config, self._model)

    @property
    def device(self) -> str:
        """What this rank computes on: where its logits lie, not what it was told."""
        import torch  # noqa: PLC0415 (slow to import; `load` has done it)

        where = self._model.device
        return f"cuda ({torch.cuda.get_device_name(where)})" if where.type == "cuda" else where.type

    def lead(self, parent: Channel, peers: list[Channel]) -> None:
        """Rank 0: serve until told to quit."""
        from cloud_tier.engine.core import EngineBroken, EngineCore  # noqa: PLC0415 (imports torch)

        model, inbox = self._model, Inbox(parent)

        def compute(step: Compute) -> Computed:
            if not peers:
                handles = [segment.handle for segment in step.segments]
                yielding = core.yielding(handles)
                return model.run(step, lambda: inbox.deserted(handles, yielding))
            try:
                for peer in peers:
                    peer.send(step)
                return model.run(step)
            except Exception as error:
                # The other ranks may wait inside this step for sums that will not come.
                raise EngineBroken(f"{in_words(error)}; the ranks are out of step") from error

        core = EngineCore(
            self._config,
            compute,
            vocab_size=model.config.vocab_size,
            context_tokens=self._context_tokens,
            clock=MonotonicClock(),
            draft=None if self._draft is None else self._draft.run,
        )
        core.probe()
        parent.send(Ready(self._info()))
        _serve(parent, inbox, core)
        for peer in peers:
            peer.send(Quit())
        model.group.leave()

    def follow(self, leader: Channel) -> None:
        """Any other rank: run what rank 0 runs."""
        while isinstance(message := leader.receive(), Compute):
            self._model.run(message)
        self._model.group.leave()

    def _info(self) -> EngineInfo:
        config = self._model.config
        return EngineInfo(
            vocab_size=config.vocab_size,
            context_tokens=self._context_tokens,
            max_running=self._config.max_running,
            tensor_parallel=self._config.tensor_parallel,
        )


def load(setup: Setup, mesh_fds: list[int] | None = None) -> tuple[Model, int]:
    """Join the group and load this rank's share of the weights; return the model and its window.

    Args:
        mesh_fds: connected stream sockets to every other rank, in their order; None leaves all sums to gloo or NCCL.
    """
    import torch  # noqa: PLC0415 (slow to import; the parent's death must be watched before)

    from cloud_tier.engine.mesh import Mesh  # noqa: PLC0415
    from cloud_tier.engine.model import Model  # noqa: PLC0415
    from cloud_tier.engine.parallel import Group  # noqa: PLC0415
    from models.formats.weights import open_weights  # noqa: PLC0415

    config = setup.config
    torch.set_num_threads(config.threads[0])
    if config.device == "cuda":
        _need_gpus(torch.cuda.device_count(), config)
        torch.cuda.set_device(setup.rank)
    weights = open_weights(Path(config.weights), config.layers)
    mesh = None
    if mesh_fds:
        others = [rank for rank in range(config.tensor_parallel) if rank != setup.rank]
        mesh = Mesh(setup.rank, {rank: socket.socket(fileno=fd) for rank, fd in zip(others, mesh_fds, strict=True)})
        mesh.join()
    place = setup.rank, config.tensor_parallel
    group = Group.join(place, setup.rendezvous, config.device, config.start_timeout_s, mesh)
    cache_tokens = config.kv_cache_tokens // config.kv_block_tokens * config.kv_block_tokens
    context_tokens = min(
        config.max_context_tokens or weights.config.max_context_tokens, weights.config.max_context_tokens, cache_tokens
    )
    try:
        return Model(weights, config, group, context_tokens), context_tokens
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU of rank {setup.rank} has no room for its share of {config.weights} in {config.dtype} and "
            f"{cache_tokens} tokens of KV cache; lower kv_cache_tokens, raise tensor_parallel, or take other `gpus`",
            param="models.kv_cache_tokens",
        ) from error


def load_draft(config: EngineConfig, model: Model) -> Model | None:
    """Load the smaller model that drafts for `model`, with a KV cache of as many tokens; None if there is none."""
    if config.draft_weights is None:
        return None
    from cloud_tier.engine.model import Model  # noqa: PLC0415 (imports torch)
    from models.formats.weights import open_weights  # noqa: PLC0415

    weights = open_weights(Path(config.draft_weights), config.draft_layers)
    return Model(weights, config, model.group, model.context_tokens)


def _need_gpus(found: int, config: EngineConfig) -> None:
    if found < config.tensor_parallel:
        among = f" among gpus = {list(config.gpus)}" if config.gpus else ""
        raise ConfigError(
            f"tensor_parallel = {config.tensor_parallel} on cuda needs as many GPUs and torch sees {found}{among}; "
            "lower it, or set device = 'cpu'",
            param="models.tensor_parallel",
        )


def _serve(parent: Channel, inbox: Inbox, core: EngineCore) -> None:
    """Take requests between steps, step while there is work, sleep in the sockets while there is none."""
    core.compiling.wake = inbox.ring
    last_handle = -1
    while True:
        for message in inbox.take(wait=not core.busy):
            if isinstance(message, Quit):
                return
            if isinstance(message, Add):
                core.add(message.handle, message.request)
                last_handle = message.handle
            elif isinstance(message, LimitLines):
                core.limit_lines(message.lines)
            else:
                core.abort(message.handle)
        parent.send(Step(core.step(), core.load(), last_handle))


if __name__ == "__main__":
    sys.exit(main())
