"""Runs given steps on a real gloo group of processes, and on one rank here, to compare their logits."""

from __future__ import annotations

import itertools
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import torch

from cloud_tier.engine.messages import Segment, Setup
from cloud_tier.engine.model import Model
from cloud_tier.engine.parallel import Group
from cloud_tier.engine.protocol import EngineConfig
from models.formats.weights import open_weights
from tests.support.paths import REPOSITORY

SCRIPT = Path(__file__).with_name("engine_rank.py")


def on_ranks(config: EngineConfig, steps: list[list[Segment]], folder: Path, *, mesh: bool) -> torch.Tensor:
    """Return rank 0's logits of all steps, computed by `config.tensor_parallel` processes, with or without a mesh."""
    encoder = msgspec.msgpack.Encoder()
    ranks = range(config.tensor_parallel)
    (folder / "steps").write_bytes(encoder.encode(steps))
    sockets: list[list[socket.socket]] = [[] for _ in ranks]
    for low, high in itertools.combinations(ranks, 2) if mesh else ():
        for rank, end in zip((low, high), socket.socketpair(), strict=True):
            sockets[rank].append(end)
    running = []
    for rank in ranks:
        setup = folder / f"setup-{rank}"
        setup.write_bytes(encoder.encode(Setup(config, rank, str(folder / "rendezvous"))))
        fds = [end.fileno() for end in sockets[rank]]
        command = [sys.executable, str(SCRIPT), str(setup), str(folder / "steps"), str(folder / "logits.npy")]
        environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        running.append(subprocess.Popen([*command, *map(str, fds)], cwd=REPOSITORY, env=environment, pass_fds=fds))
    for end in itertools.chain(*sockets):
        end.close()
    assert [process.wait(120) for process in running] == [0] * config.tensor_parallel
    return torch.from_numpy(np.load(folder / "logits.npy"))


def on_one(config: EngineConfig, steps: list[list[Segment]]) -> torch.Tensor:
    """Return the logits of all steps, computed here."""
    model = Model(open_weights(Path(config.weights)), config, Group(), config.max_context_tokens or 256)
    logits = [model.forward(step).logits for step in steps]
    return torch.cat([one for one in logits if one is not None])


def lives(prompt: list[int], others: list[int]) -> list[list[Segment]]:
    """Steps of two sequences in blocks of 16: `prompt` in two chunks, 32 decode steps, `others` joining midway."""
    blocks, cut = [(0, 6)], len(prompt) // 2
    steps = [
        [Segment(0, prompt[:cut], blocks, draws=False)],
        [Segment(cut, prompt[cut:], blocks, draws=True)],
    ]
    for step in range(32):
        token = (7 * step + 3) % 300
        steps.append([Segment(len(prompt) + step, [token], blocks, draws=True)])
        if step == 16:
            steps[-1].append(Segment(0, others, [(9, 1), (7, 2)], draws=True, handle=1))
    return steps
