"""Sums of small tensors between CPU ranks, over sockets of their own.

A decode step on N ranks adds up two tensors of a few kilobytes a layer. gloo hands each through three threads, which
costs 0.3 to 0.8 ms on a busy machine; sending it to the other ranks directly and adding here costs 0.03 ms. Large
tensors, and everything on a GPU, stay with torch.distributed.
"""

from __future__ import annotations

import socket

import torch

from cloud_tier.engine.messages import MESH_LIMIT_BYTES
from router.base.errors import ConfigError


class Mesh:
    """A socket to every other rank.

    Every rank sends to all others before it reads, so the largest tensor that is summed here must fit a socket's
    buffer, or all would wait for each other. `join` proves that it does.

    Attributes:
        LIMIT_BYTES: the largest tensor that is summed here.
    """

    LIMIT_BYTES = MESH_LIMIT_BYTES

    def __init__(self, rank: int, peers: dict[int, socket.socket]) -> None:
        """Join.

        Args:
            rank: of this process.
            peers: a connected stream socket to every other rank.
        """
        self._rank = rank
        self._peers = dict(sorted(peers.items()))
        self._inbox = torch.empty((len(peers) + 1, self.LIMIT_BYTES), dtype=torch.uint8)

    def join(self) -> None:
        """Exchange a message of the largest size with every other rank; return when all are here.

        Raises:
            ConfigError: a socket does not take it at once; names the remedy.
            ConnectionError: a rank is gone.
        """
        largest = bytes(self.LIMIT_BYTES)
        for peer in self._peers.values():
            try:
                taken = peer.send(largest, socket.MSG_DONTWAIT)
            except BlockingIOError:
                taken = 0
            if taken < len(largest):
                raise ConfigError(
                    f"a socket between two ranks takes {taken} bytes at once, and the sums between them need "
                    f"{len(largest)}: raise the kernel's limit (sysctl -w net.core.wmem_max=212992), "
                    "or set tensor_parallel = 1",
                    param="tensor_parallel",
                )
        for rank, peer in self._peers.items():
            _fill(peer, _bytes(self._inbox[rank]))

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, the same to the last bit on each: they are added in the order of ranks.

        Raises:
            ConnectionError: a rank is gone.
        """
        part = part.contiguous()
        mine = _bytes(part)
        for peer in self._peers.values():
            peer.sendall(mine)
        parts = {self._rank: part}
        for rank, peer in self._peers.items():
            raw = self._inbox[rank, : len(mine)]
            _fill(peer, _bytes(raw))
            parts[rank] = raw.view(part.dtype).view(part.shape)
        total = parts[0] + parts[1]
        for rank in range(2, len(parts)):
            total += parts[rank]
        return total

    def gather_last(self, part: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        """Join (rows, width) of all ranks along the last dimension on rank 0; None on the others.

        Raises:
            ConnectionError: a rank is gone.
        """
        part = part.contiguous()
        if self._rank > 0:
            self._peers[0].sendall(_bytes(part))
            return None
        parts = [part]
        for rank, peer in self._peers.items():
            parts.append(torch.empty((part.shape[0], widths[rank]), dtype=part.dtype))
            _fill(peer, _bytes(parts[-1]))
        return torch.cat(parts, dim=-1)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _fill(peer: socket.socket, memory: memoryview) -> None:
    received = 0
    while received < len(memory):
        size = peer.recv_into(memory[received:])
        if size == 0:
            raise ConnectionError("another rank of the engine is gone")
        received += size
