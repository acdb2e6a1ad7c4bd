"""One rank of a real process group, for tests: runs the given steps and, on rank 0, saves the logits.

Usage: engine_rank.py SETUP STEPS OUTPUT [MESH_FD…] (MessagePack, MessagePack, .npy, sockets to the other ranks)
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from cloud_tier.engine.messages import Segment, Setup
from cloud_tier.engine.worker import load


def main() -> None:
    setup_path, steps_path, output = map(Path, sys.argv[1:4])
    setup = msgspec.msgpack.decode(setup_path.read_bytes(), type=Setup)
    model, _ = load(setup, [int(fd) for fd in sys.argv[4:]])
    steps = msgspec.msgpack.decode(steps_path.read_bytes(), type=list[list[Segment]])
    logits = [model.forward(step).logits for step in steps]
    if setup.rank == 0:
        np.save(output, np.concatenate([one.numpy() for one in logits if one is not None]))
    else:
        assert all(one is None for one in logits)
    model.group.leave()


if __name__ == "__main__":
    main()
