"""An answer in one piece: the same, whichever of its tokens went past its reader."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import ReplicaBroken
from router.gateway.whole import Whole, collect
from router.values.answer import Tap
from router.values.chunk import FinishReason, TokenChunk
from router.values.logprobs import TokenLogprob
from router.values.usage import TokenDetails, Usage
from tests.router.dispatch.test_taps import as_pushing
from tests.support.router_fakes import request, world

LAST = TokenChunk("!", 1, FinishReason.STOP, prompt_tokens=7, details=TokenDetails({}, {"reasoning_tokens": 2}))


class Scripted:
    """Chunks of which some go past their reader: those that are marked, once there is somewhere for them to go."""

    def __init__(self, chunks: list[tuple[TokenChunk, bool]]) -> None:
        self.taps: list[Tap] = []
        self._rest = self._read(chunks)
        self.past = 0

    def tap(self, tap: Tap) -> None:
        self.taps.append(tap)

    def __aiter__(self) -> AsyncIterator[TokenChunk]:
        return self._rest

    async def _read(self, chunks: list[tuple[TokenChunk, bool]]) -> AsyncGenerator[TokenChunk, None]:
        for chunk, past in chunks:
            if past and self.taps and not self.taps[0].full:
                self.taps[0].give([chunk])
                self.past += 1
            else:
                yield chunk


def piece(text: str, tokens: int, thought: str, told: int) -> TokenChunk:
    said = tuple(TokenLogprob(text, -0.5, text.encode()) for _ in range(told))
    return TokenChunk(text, tokens, logprobs=said, reasoning=thought)


PIECES = st.builds(piece, st.text(max_size=4), st.integers(0, 3), st.text(max_size=2), st.integers(0, 2))


@given(
    first=PIECES,
    cached=st.none() | st.integers(0, 5),
    rest=st.lists(st.tuples(PIECES, st.booleans()), max_size=12),
)
async def test_what_goes_past_its_reader_is_part_of_the_answer(
    first: TokenChunk, cached: int | None, rest: list[tuple[TokenChunk, bool]]
) -> None:
    begun = TokenChunk(first.text, first.tokens, cached_tokens=cached, logprobs=first.logprobs)
    every = [begun, *(chunk for chunk, _ in rest), LAST]
    scripted = Scripted([(begun, False), *rest, (LAST, False)])
    assert await collect(scripted, 4) == Whole(  # type: ignore[arg-type]
        "".join(chunk.text for chunk in every),
        FinishReason.STOP,
        Usage(7, sum(chunk.tokens for chunk in every), cached, LAST.details),
        tuple(one for chunk in every for one in chunk.logprobs),
        (),
        "".join(chunk.reasoning for chunk in every),
    )
    assert scripted.past == sum(past for _, past in rest)


async def test_an_answer_that_ends_without_a_reason_is_none() -> None:
    with pytest.raises(ReplicaBroken, match="without a finish reason"):
        await collect(Scripted([(TokenChunk("a"), False), (TokenChunk("b"), True)]), 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("faults", [[], [("break", 5)]], ids=["whole", "finished by another replica"])
async def test_its_tokens_wake_nobody(faults: list[tuple[str, int]]) -> None:
    async with world() as w:
        as_pushing(w)
        w.local.faults = list(faults)

        async def asked() -> Whole:
            running = await w.dispatcher.start(request(w.clock, max_tokens=20))
            try:
                return await collect(running.chunks, 4)
            finally:
                await running.chunks.aclose()

        whole = await w.clock.run(asked())
    assert whole.usage.completion_tokens == 20
    assert sum(replica.given for replica in w.all) > 10
