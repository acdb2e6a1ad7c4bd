"""The sums and gathers of a tensor-parallel group."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from cloud_tier.engine.mesh import Mesh


class Group:
    """The ranks of one engine. With one rank every operation is free.

    Attributes:
        rank: of this process; rank 0 schedules and samples.
        ranks: how many there are.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, mesh: Mesh | None = None) -> None:
        self.rank = rank
        self.ranks = ranks
        self._mesh = mesh

    @classmethod
    def join(
        cls, place: tuple[int, int], rendezvous: str, device: str, timeout_s: float, mesh: Mesh | None = None
    ) -> Group:
        """Meet the other ranks of this host: NCCL on a GPU, gloo on a CPU.

        Args:
            place: rank of this process, number of ranks.
            rendezvous: path of a file that no earlier group has used.
            timeout_s: bound on every collective.
            mesh: carries what is small, on a CPU.
        """
        rank, ranks = place
        if ranks > 1:
            # All ranks live on this host; its name may resolve to an interface that is down.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=timeout_s),
                device_id=torch.device("cuda", rank) if device == "cuda" else None,
            )
        return cls(rank, ranks, mesh)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of the tensor over all ranks; it may be overwritten."""
        if self._mesh is not None and part.nbytes <= Mesh.LIMIT_BYTES:
            return self._mesh.sum(part)
        if self.ranks > 1:
            dist.all_reduce(part)
        return part

    def gather_last(self, part: torch.Tensor, widths: list[int], padded: int) -> torch.Tensor | None:
        """Join (rows, width) of all ranks along the last dimension on rank 0; None on the others.

        Args:
            widths: of every rank's part.
            padded: the widest, since a gather moves equal sizes.
        """
        if self.ranks == 1:
            return part
        if self._mesh is not None:
            return self._mesh.gather_last(part, widths)
        part = torch.nn.functional.pad(part, (0, padded - part.shape[-1])).contiguous()
        parts = [torch.empty_like(part) for _ in widths] if self.rank == 0 else None
        dist.gather(part, parts, dst=0)
        if parts is None:
            return None
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], dim=-1)

    def leave(self) -> None:
        """Destroy the process group."""
        if self.ranks > 1:
            dist.destroy_process_group()
