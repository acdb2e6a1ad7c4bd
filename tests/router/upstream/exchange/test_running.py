"""What runs elsewhere, against a model that looks at every request at each report."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from router.upstream.exchange.running import Running, RunningWork


@dataclass(eq=False)
class One:
    """A request as the model knows it."""

    prompt: int
    left: int
    began_s: float
    came: int = 0
    kv: int = 0
    at_report: int | None = None


steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 90), st.integers(0, 5)),
        st.tuples(st.just("came"), st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("report"), st.integers(0, 3), st.integers(0, 1)),  # so long ago; whether ours are counted
        st.tuples(st.just("later"), st.integers(1, 3), st.just(0)),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 8))
def test_what_is_noted_late_is_what_was_there(taken: list[tuple[str, int, int]], asked_every: int) -> None:
    work, now_s, reported_s = RunningWork(), 10.0, 0.0
    running: list[tuple[Running, One]] = []
    ended, ended_tokens, ended_kv = 0, 0, 0
    for step, (kind, first, second) in enumerate(taken):
        if kind == "later":
            now_s += first
        elif kind == "begin":
            running.append((work.begin(first, second, now_s), One(first, second, now_s)))
        elif kind == "report" and now_s - first >= reported_s:  # an older one is not taken in
            reported_s, ended, ended_tokens, ended_kv = now_s - first, 0, 0, 0
            work.reported(reported_s, counts_ours=bool(second))
            for _, one in running:
                one.at_report = one.left if second and one.began_s <= reported_s else None
                one.kv = one.prompt + one.came if one.came else 0
        elif kind == "came" and running:
            own, one = running[first % len(running)]
            work.came(own, second)
            one.left, one.came = max(0, one.left - second), one.came + second
        elif kind == "end" and running:
            own, one = running.pop(first % len(running))
            work.end(own)
            if one.at_report is not None:
                ended, ended_tokens, ended_kv = ended + 1, ended_tokens + one.at_report, ended_kv + one.kv
        if step % asked_every:
            continue
        ones = [one for _, one in running]
        unknown = [one for one in ones if one.at_report is None]
        unseen = work.unseen()
        assert unseen.requests == len(unknown)
        assert unseen.prompt_tokens == sum(one.prompt for one in unknown)
        assert unseen.left_tokens == sum(one.left for one in unknown)
        assert (work.ended, work.ended_tokens, work.ended_kv_tokens) == (ended, ended_tokens, ended_kv)
        assert work.kv_taken_tokens == sum(one.prompt + one.came - one.kv for one in ones)
        assert len(work) == len(ones)
