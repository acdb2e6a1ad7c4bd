"""A step for which nobody waits any more is left between two layers: who comes then need not wait for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_tier.engine.inbox import Inbox
from cloud_tier.engine.messages import Abort, Add, Channel, Compute, Quit, ToRank0
from cloud_tier.engine.model import Computed, Deserted
from cloud_tier.engine.protocol import EngineRequest
from router.values.sampling import SamplingParams
from tests.support import engine_models
from tests.support.engine_models import Bench, prompt, small


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine_models.save("llama", tmp_path_factory.mktemp("weights"))


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Inbox]]:
    """The parent's end, and rank 0's inbox."""
    mine, theirs = socket.socketpair()
    decoder = msgspec.msgpack.Decoder(ToRank0)
    with mine, theirs:
        yield Channel(mine, decoder), Inbox(Channel(theirs, decoder))


def _add(handle: int) -> Add:
    return Add(handle, EngineRequest(f"r{handle}", (1, 2), SamplingParams(), 4))


def test_a_step_is_deserted_once_all_its_requests_are(ends: tuple[Channel, Inbox]) -> None:
    parent, inbox = ends
    assert not inbox.deserted([0, 1])
    parent.send(Abort(0))
    assert not inbox.deserted([0, 1])
    parent.send(_add(2))
    parent.send(Abort(1))
    assert inbox.deserted([0, 1])
    assert not inbox.deserted([0, 1, 2])
    assert inbox.take(wait=True) == [Abort(0), _add(2), Abort(1)]
    assert inbox.take(wait=False) == []
    assert not inbox.deserted([0, 1]), "what was taken is known to the engine"


@given(looks=st.lists(st.booleans(), max_size=12))
@settings(max_examples=20, deadline=None)
def test_no_message_is_lost_or_changes_its_place(looks: list[bool]) -> None:
    mine, theirs = socket.socketpair()
    decoder = msgspec.msgpack.Decoder(ToRank0)
    with mine, theirs:
        parent, inbox = Channel(mine, decoder), Inbox(Channel(theirs, decoder))
        taken, sent = [], []
        for number, look in enumerate(looks):
            sent.append(_add(number) if number % 2 else Abort(number))
            parent.send(sent[-1])
            if look:
                inbox.deserted([99])
            else:
                taken += inbox.take(wait=False)
        parent.send(Quit())
        taken += inbox.take(wait=True)
        assert taken == [*sent, Quit()]


def test_the_bell_and_a_lost_parent_end_a_wait(ends: tuple[Channel, Inbox]) -> None:
    parent, inbox = ends
    ringing = threading.Timer(0.01, inbox.ring)
    ringing.start()
    assert inbox.take(wait=True) == []
    ringing.join()
    parent.socket.close()
    with pytest.raises(EOFError):
        inbox.deserted([0])
    with pytest.raises(EOFError):
        inbox.take(wait=True)


class _Leaving:
    """Computes the steps of a bench, and leaves each of some at a layer."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.layer: int | None = None
        self.asked = 0
        bench.core._compute = self

    def __call__(self, step: Compute) -> Computed:
        self.asked = 0
        return self.bench.model.run(step, self._deserted)

    def _deserted(self) -> bool:
        self.asked += 1
        return self.layer is not None and self.asked > self.layer


@pytest.mark.parametrize("layer", [0, 1, "the logits"])
def test_what_was_left_is_as_if_it_had_never_begun(llama: Path, layer: int | str) -> None:
    """Prompts and answers, left at any layer and computed again, come out as those that never were."""
    expected = Bench(small(llama))
    bench = Bench(small(llama))
    for seed in range(3):
        expected.add(seed, prompt(40, seed))
        bench.add(seed, prompt(40, seed))
    leaving = _Leaving(bench)
    place = layer if isinstance(layer, int) else bench.model.config.num_layers
    while bench.core.busy:
        leaving.layer = place
        bench.step()
        assert leaving.asked == place + 1, "it was not left where nobody waited any more"
        leaving.layer = None
        bench.step()
    assert not bench.failures
    assert bench.answers == expected.run()


def test_who_left_is_forgotten_and_the_next_one_is_served(llama: Path) -> None:
    bench = Bench(small(llama))
    leaving = _Leaving(bench)
    bench.add(0, prompt(60))
    bench.add(1, prompt(60, 1))
    leaving.layer = 1
    bench.step()
    for handle in (0, 1):
        bench.core.abort(handle)
    leaving.layer = None
    bench.add(2, prompt(20, 2))
    alone = Bench(small(llama))
    alone.add(2, prompt(20, 2))
    assert bench.run()[2] == alone.run()[2]
    assert bench.core.pool.num_free == bench.core.pool.num_blocks
    assert bench.core.load().failed == 0


def test_a_request_that_fails_alone_may_be_left_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(small(llama))
    leaving = _Leaving(bench)
    bench.add(0, prompt(20))
    real, calls = bench.model.run, []

    def run(*step: object) -> Computed:
        calls.append(step)
        if len(calls) == 1:
            raise RuntimeError("out of memory")
        raise Deserted

    monkeypatch.setattr(bench.model, "run", run)
    bench.step()
    assert len(calls) == 2
    assert not bench.failures
    monkeypatch.setattr(bench.model, "run", real)
    leaving.layer = None
    assert len(bench.run()[0]) == 12
