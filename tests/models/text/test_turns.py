"""A thread that callers share by turns."""

import threading

import pytest

from models.text.turns import TurnsThread


def test_callers_take_turns_and_what_was_cancelled_is_left_out() -> None:
    thread, gate, done = TurnsThread("t"), threading.Event(), []

    def work(name: str) -> str:
        gate.wait(60)
        done.append(name)
        return name

    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    made = {name: thread.submit(name[0], lambda name=name: work(name)) for name in names}
    assert made["a3"].cancel()
    gate.set()
    assert [made[name].result(60) for name in names if name != "a3"] == ["a1", "a2", "a4", "b1", "b2", "c1"]
    assert done[0] == "a1"
    assert done.index("c1") < done.index("a4")
    assert done.index("b1") < done.index("a4")
    assert done.index("a2") < done.index("a4")


def test_what_fails_is_told_and_the_next_one_goes_on() -> None:
    thread = TurnsThread("t")

    def fails() -> None:
        raise ValueError("a reason")

    failed, fine = thread.submit("a", fails), thread.submit("a", lambda: "on")
    with pytest.raises(ValueError, match="a reason"):
        failed.result(60)
    assert fine.result(60) == "on"
