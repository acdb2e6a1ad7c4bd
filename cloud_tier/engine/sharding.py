"""Which slice of every weight a tensor-parallel rank holds.

Column-parallel (rows of the weight matrix are split): q, k, v, gate, up, and the vocabulary of embedding and head.
Row-parallel (columns are split, partial results are summed): o and down, which have no bias in any model served here.
Attention is split by KV head, each with its group of query heads, so that no rank needs another's keys. Parts need not
be equal: 3 KV heads on 2 ranks are 2 + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Span:
    """Indices `[start, end)`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.end - self.start

    def times(self, factor: int) -> Span:
        """The same part of something `factor` times finer."""
        return Span(self.start * factor, self.end * factor)


def split(total: int, parts: int, index: int) -> Span:
    """Return part `index` of `total` things split contiguously; sizes differ by at most one, wide parts first."""
    small, wide = divmod(total, parts)
    start = index * small + min(index, wide)
    return Span(start, start + small + (1 if index < wide else 0))


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one rank.

    Attributes:
        kv_heads, query_heads: heads computed here.
        intermediate: columns of the feed-forward layer.
        vocab: token ids whose embedding row and logit live here.
        vocab_width: the widest vocabulary share of all ranks: gathered logits are padded to it.
    """

    rank: int
    ranks: int
    kv_heads: Span
    query_heads: Span
    intermediate: Span
    vocab: Span
    vocab_width: int


def shard(rank: int, ranks: int, *, heads: tuple[int, int], intermediate: int, vocab: int) -> Shard:
    """Return the share of `rank`.

    Args:
        heads: number of query heads and of KV heads.

    Raises:
        ConfigError: there are more ranks than KV heads.
    """
    num_heads, num_kv_heads = heads
    if ranks > num_kv_heads:
        raise ConfigError(
            f"tensor_parallel = {ranks}, but the model has {num_kv_heads} KV heads and a rank needs at least one; "
            f"choose at most {num_kv_heads}",
            param="tensor_parallel",
        )
    kv_heads = split(num_kv_heads, ranks, rank)
    return Shard(
        rank=rank,
        ranks=ranks,
        kv_heads=kv_heads,
        query_heads=kv_heads.times(num_heads // num_kv_heads),
        intermediate=split(intermediate, ranks, rank),
        vocab=split(vocab, ranks, rank),
        vocab_width=split(vocab, ranks, 0).size,
    )
