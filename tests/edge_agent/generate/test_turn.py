"""The turn is exclusive and passes in the order of arrival."""

from __future__ import annotations

import threading
import time

from edge_agent.generate.turn import Turn


def test_the_turn_passes_in_the_order_of_arrival() -> None:
    turn, order, inside = Turn(), [], []

    def work(number: int) -> None:
        with turn:
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    with turn:
        for number, thread in enumerate(threads):
            thread.start()
            while len(turn._queue) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(20))
    with turn:
        pass


def test_whoever_returns_at_once_still_lets_the_other_in() -> None:
    turn, counts = Turn(), [0, 0]
    stop = threading.Event()

    def work(number: int) -> None:
        while not stop.is_set():
            with turn:
                counts[number] += 1
                time.sleep(0.0005)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    while min(counts) < 50:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert max(counts) < 2 * min(counts) + 10
