"""How many lines may run beside what online traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from router.jobs.slack import _FLAT, Slack
from router.values.replica import ReplicaInfo, ReplicaSnapshot, SpeedPrior
from router.values.task import Task
from tests.support.gateway_fakes import replica_info
from tests.support.served import SetClock


def _snapshot(slots: int = 8, running: int = 0, slope: float = 0.2, name: str = "a", **more) -> ReplicaSnapshot:
    prior = SpeedPrior(900.0, 60.0, slope, "test")
    info = replica_info(replica_id=name, endpoint=name, prior=prior)
    return ReplicaSnapshot(info, **{"available": True, "slots": slots, "running": running, **more})


@dataclass
class World:
    """A tier's replicas and its clock."""

    snapshots: list[ReplicaSnapshot] = field(default_factory=lambda: [_snapshot()])
    clock: SetClock = field(default_factory=SetClock)
    concurrency: int = 0
    slowdown: float = 0.05
    slower: float = 1.0  # than it was said to be
    limits: list[int | None] = field(default_factory=list)

    def slack(self) -> Slack:
        return Slack(self, self.clock, self.concurrency, self.slowdown)

    def load(self) -> list[ReplicaSnapshot]:
        return self.snapshots

    def limit_lines(self, lines: int | None) -> None:
        self.limits.append(lines)

    def step_s(self, info: ReplicaInfo, batch: int, slots: int) -> float:
        return self.slower * (1 + info.prior.decode_batch_slope * (batch - 1)) / info.prior.decode_tokens_per_s


def test_an_idle_tier_gives_all_its_slots() -> None:
    assert World().slack().allow(0).lines == 8
    assert World([_snapshot(), _snapshot(name="b")]).slack().allow(0).lines == 16
    assert World(concurrency=3).slack().allow(0).lines == 3
    assert World([_snapshot(available=False)]).slack().allow(0).lines == 0
    assert World([]).slack().allow(0).why == "no replica is available"


def test_a_step_of_lines_alone_is_short() -> None:
    """As many as decode in a tenth of a second: who comes has to wait for that step."""
    slow = SpeedPrior(900.0, 20.0, 0.2, "test")  # 50 ms alone, 10 ms more for each further one
    info = replica_info(prior=slow)
    assert World([ReplicaSnapshot(info, available=True, slots=32)]).slack().allow(0).lines == 6
    slower = replica_info(prior=SpeedPrior(9.0, 2.0, 0.2, "test"))
    assert World([ReplicaSnapshot(slower, available=True, slots=32)]).slack().allow(0).lines == 1
    fast = replica_info(prior=SpeedPrior(9000.0, 100.0, 0.005, "test"))
    assert World([ReplicaSnapshot(fast, available=True, slots=256)]).slack().allow(0).lines == 256


def test_a_step_is_as_long_as_the_replica_was_found_to_take() -> None:
    fast = replica_info(prior=SpeedPrior(9000.0, 100.0, 0.005, "test"))
    world = World([ReplicaSnapshot(fast, available=True, slots=256)], slower=8.0)
    assert world.slack().allow(0).lines == 51  # of 80 ms alone, and 0.4 ms more for each further one
    assert world.slack().allow(60).keep == 256, "nothing is stopped because speeds are known better"


def test_an_engine_that_leaves_steps_computes_as_many_as_it_has_slots() -> None:
    slow = replica_info(prior=SpeedPrior(9.0, 2.0, 0.2, "test"), leaves_steps=True)
    assert World([ReplicaSnapshot(slow, available=True, slots=32)]).slack().allow(0).lines == 32


def test_where_many_find_lines_a_step_is_bound_by_their_first_tokens() -> None:
    """Arrivals too sparse to hold back for: each finds lines, and may wait for a fifth of its first token."""
    info = replica_info(prior=SpeedPrior(9000.0, 100.0, 0.05, "test"))
    world = World([ReplicaSnapshot(info, available=True, slots=128)])
    slack = world.slack()
    assert slack.allow(0).lines == 128  # of 73 ms

    def come(number: int, every_s: float) -> int:
        for _ in range(number):
            slack.came()
            slack.first_token(0.2)
            slack.left()
            world.clock.time_s += every_s
        world.clock.time_s += slack.hold_left_s + 0.001
        return slack.allow(0).lines

    assert come(20, 15.0) == 61  # of 40 ms
    assert come(256, 0.1) == 128, "the hold covers nearly all of them"
    assert come(20, 15.0) == 61
    world.clock.time_s += 601.0
    assert slack.allow(0).lines == 128, "nobody comes any more"


def test_two_rungs_of_one_device_share_its_slots() -> None:
    rungs = [
        ReplicaSnapshot(replica_info(replica_id=name, device="gpu"), available=True, slots=8) for name in ("a", "b")
    ]
    assert World(rungs).slack().allow(0).lines == 8


def test_what_others_have_sent_to_a_server_is_taken() -> None:
    world = World([_snapshot(running=5)])
    assert world.slack().allow(running=0).lines == 3
    assert world.slack().allow(running=5).lines == 8  # it is all lines


def test_lines_stop_for_an_online_request_where_they_would_slow_it_down() -> None:
    world = World()
    slack = world.slack()
    changes = []
    slack.changed = lambda: changes.append(slack.allow(8).lines)
    slack.came()
    assert changes == [0]
    slack.left()
    assert slack.allow(0).lines == 0  # the next one may come at once
    world.clock.time_s += slack.hold_left_s + 0.001
    assert slack.allow(0).lines == 8


def test_lines_run_beside_where_that_costs_little() -> None:
    world = World([_snapshot(slots=256, slope=0.005)], slowdown=0.05)
    slack = world.slack()
    slack.came()
    beside = slack.allow(0)
    assert beside.beside
    assert beside.lines == 10  # of which each costs half a percent
    for _ in range(99):
        slack.came()
    assert slack.allow(0).lines == 14  # beside a hundred each costs a third of one percent


def _holding(name: str = "a", slope: float = 0.2, **more) -> ReplicaSnapshot:
    prior = SpeedPrior(900.0, 60.0, slope, "test")
    info = replica_info(replica_id=name, endpoint=name, prior=prior, holds_up=True, **more)
    return ReplicaSnapshot(info, available=True, slots=8)


def test_lines_that_are_held_up_lose_nothing_and_run_whenever_nobody_is_there() -> None:
    world = World([_holding(leaves_steps=True)])
    slack = world.slack()
    assert slack.allow(8).computed is None
    slack.came()
    there = slack.allow(8)
    assert (there.lines, there.keep, there.computed, there.why) == (0, 8, 0, "online requests come first")
    slack.left()
    assert slack.hold_left_s > 0.0
    gone = slack.allow(8)
    assert (gone.lines, gone.keep, gone.computed, gone.why) == (8, 8, None, "")
    for allowance in (there, gone):
        slack.limit(allowance)
    assert world.limits == [0, None]


def test_a_cpu_computes_no_line_beside_others_however_flat_it_seemed() -> None:
    slack = World([_holding(slope=0.0, leaves_steps=True)]).slack()
    slack.came()
    assert slack.allow(0).computed == slack.allow(0).lines == 0


def test_where_a_step_is_not_left_lines_hold_back_and_some_run_beside() -> None:
    gpus = [ReplicaSnapshot(_holding(name, slope=0.005).info, available=True, slots=256) for name in ("a", "b")]
    world = World(gpus, slowdown=0.05)
    slack = world.slack()
    slack.came()
    there = slack.allow(300)
    assert (there.lines, there.keep, there.computed, there.held_up) == (20, 512, 10, 280)
    slack.left()
    assert slack.allow(300).computed == 10, "the next one may come at once"
    world.clock.time_s += slack.hold_left_s + 0.001
    assert (slack.allow(300).computed, slack.allow(300).held_up) == (None, 0)


def test_lines_are_stopped_where_not_every_replica_holds_them_up() -> None:
    slack = World([_holding(leaves_steps=True), _snapshot(name="b")]).slack()
    slack.came()
    there = slack.allow(16)
    assert (there.lines, there.keep, there.computed) == (0, 0, None)


def test_what_generates_nothing_need_not_hold_lines_up() -> None:
    encoder = ReplicaSnapshot(replica_info(replica_id="e", tasks=frozenset({Task.EMBED})), available=True, slots=64)
    slack = World([_holding(leaves_steps=True), encoder]).slack()
    slack.came()
    assert slack.allow(16).computed == 0
    alone = World([encoder]).slack()
    alone.came()
    assert alone.allow(16).keep == 0


def test_the_hold_follows_what_gaps_are_usual() -> None:
    world = World()
    slack = world.slack()
    for _ in range(100):
        slack.came()
        slack.left()
        world.clock.time_s += 2.0
    slack.came()
    slack.left()
    assert 2.0 < slack.hold_left_s < 3.0
    for _ in range(400):
        slack.came()
        slack.left()
        world.clock.time_s += 0.01
    assert slack.hold_left_s < 0.3


@given(
    slots=st.integers(1, 64),
    slope=st.floats(0.0, 1.0),
    slowdown=st.floats(0.0, 1.0),
    online=st.integers(0, 80),
    running=st.integers(0, 64),
    occupied=st.integers(0, 100),
)
def test_lines_and_online_requests_never_exceed_the_slots(
    *, slots: int, slope: float, slowdown: float, online: int, running: int, occupied: int
) -> None:
    world = World([_snapshot(slots=slots, running=occupied, slope=slope)], slowdown=slowdown)
    slack = world.slack()
    for _ in range(online):
        slack.came()
    allowed = slack.allow(running)
    assert 0 <= allowed.lines <= max(0, slots - online)
    if not allowed.lines:
        assert allowed.why
    if online and slope >= _FLAT:
        alone, beside = 1 + slope * (online - 1), 1 + slope * (online + allowed.lines - 1)
        assert beside <= alone * (1 + slowdown) + 1e-6
