"""What replicas are expected to find of a prompt: never more than there can be, and no more than they tell."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from router.signals import affinity as module
from router.signals.affinity import BLOCK_TOKENS, Affinity
from router.values.prompt import EncodedPrompt, TextPrompt
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from router.values.task import EmbedCall
from tests.support.clocks import VirtualClock

EDGE, CLOUD = "local/tiny", "cloud/tiny"
_numbers = itertools.count()


def ids_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(count)]


def ask(
    ids: list[int] | None, tokens: int | None = None, *, session: str | None = None, **changes: Any
) -> InferenceRequest:
    plain = InferenceRequest(
        request_id=f"r{next(_numbers)}",
        model="tiny",
        prompt=TextPrompt("…"),
        sampling=SamplingParams(),
        objective=Objective(session=session),
        prompt_tokens=len(ids or []) if tokens is None else tokens,
        accepted_at_s=0.0,
        encoded=None if ids is None else EncodedPrompt(tuple(ids), "the tokenizer"),
        caller="ann",
    )
    return replace(plain, **changes)


class World:
    """An `Affinity` and its clock; replicas answer at once."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.affinity = Affinity(self.clock)

    def serve(self, request: InferenceRequest, cached: int | None, answer_tokens: int = 50, where: str = EDGE) -> None:
        sent_at_s = self.clock.now_s()
        self.clock.pass_s(0.1)
        self.affinity.began(request, where, cached, sent_at_s)
        self.clock.pass_s(0.4)
        self.affinity.ended(request, where, answer_tokens)

    def expected(self, request: InferenceRequest, where: str = EDGE) -> int:
        return self.affinity.expected_cached(request, where)


def test_the_next_turn_is_expected_to_find_prompt_and_answer_where_they_were() -> None:
    world, chat = World(), ids_of(1, 400)
    world.serve(ask(chat[:150]), 0, answer_tokens=50)
    assert world.expected(ask(chat[:230])) == 200
    assert world.expected(ask(chat[:230]), CLOUD) == 0
    assert world.expected(ask(chat[:150])) == 149, "the last token is always computed"


def test_a_call_leaves_nothing_in_a_cache() -> None:
    world = World()
    world.serve(ask(None, 90, session="of both", prompt=EmbedCall(("a text",))), 10)
    assert world.expected(ask(None, 120, session="of both")) == 0
    assert not world.affinity.telling


def test_another_prompt_shares_whole_blocks_of_the_beginning() -> None:
    world, system = World(), ids_of(2, 100)
    world.serve(ask([*system, *ids_of(3, 70)]), 0)
    assert world.expected(ask([*system, *ids_of(4, 90)])) == 100 // BLOCK_TOKENS * BLOCK_TOKENS
    assert world.expected(ask(ids_of(5, 170))) == 0


def test_chats_that_share_all_whole_blocks_are_told_apart_by_how_their_prompts_end() -> None:
    world, system = World(), ids_of(6, 2 * BLOCK_TOKENS)
    for number in range(3):
        world.serve(ask([*system, number, 7, 7]), len(system), answer_tokens=20 + number)
    for number in range(3):
        assert world.expected(ask([*system, number, 7, 7, *ids_of(7, 60)])) == len(system) + 3 + 20 + number
    assert world.expected(ask([*system, 9, 7, 7, *ids_of(7, 60)])) == len(system)


@pytest.mark.parametrize("whose", [{"caller": "ben"}, {"caller": ""}, {"cache_salt": "ben"}])
def test_nobody_is_expected_to_find_what_another_left(whose: dict[str, Any]) -> None:
    world, chat = World(), ids_of(8, 200)
    world.serve(ask(chat), 0)
    assert world.expected(ask(chat)) > 0
    assert world.expected(ask(chat, **whose)) == 0


def test_a_replica_that_never_tells_is_expected_to_hold_nothing() -> None:
    world, chat = World(), ids_of(9, 200)
    world.serve(ask(chat), None)
    assert world.expected(ask(chat)) == 0


def test_one_that_tells_at_the_end_of_an_answer_is_learnt_from_as_well() -> None:
    world, chat = World(), ids_of(10, 200)
    for _ in range(30):
        request = ask(chat)
        world.affinity.began(request, EDGE, None, world.clock.now_s())
        world.clock.pass_s(1.0)
        world.affinity.told(request, EDGE, 100)
        world.affinity.ended(request, EDGE, 10)
    assert 90 <= world.expected(ask(chat)) <= 110


def test_what_is_not_there_is_unlearnt_and_learnt_again() -> None:
    world, chat = World(), ids_of(11, 300)
    world.serve(ask(chat), 0)
    for _ in range(12):
        world.serve(ask(chat), 0)
    assert world.expected(ask(chat)) < 30
    for _ in range(12):
        world.serve(ask(chat), 299)
    assert world.expected(ask(chat)) > 270


def test_old_notes_count_for_less() -> None:
    world, chat = World(), ids_of(12, 300)
    world.serve(ask(chat), 0)
    found = []
    for pause_s in (0.0, 30.0, 200.0, 1000.0, 4000.0):
        world.clock.pass_s(pause_s)
        found.append(world.expected(ask(chat)))
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.3 * found[0]


def test_repeatable_answers_are_learnt_apart_from_others() -> None:
    """A device serves them from whole chunks of a prompt alone."""
    world, chat = World(), ids_of(13, 300)
    greedy: dict[str, Any] = {"sampling": SamplingParams(temperature=0.0)}
    world.serve(ask(chat), 0)
    for _ in range(20):
        world.serve(ask(chat, **greedy), 128)
        world.serve(ask(chat), 299)
    assert world.expected(ask(chat)) > 280
    assert 110 < world.expected(ask(chat, **greedy)) < 150


def test_two_of_a_kind_at_once_teach_nothing() -> None:
    """The second could not find what the first was only bringing."""
    world, chat = World(), ids_of(14, 300)
    world.serve(ask(ids_of(15, 64)), 0)
    for _ in range(20):
        first, second = ask(chat), ask(chat)
        sent_at_s = world.clock.now_s()
        world.clock.pass_s(0.5)
        world.affinity.began(first, EDGE, 0, sent_at_s)
        world.affinity.began(second, EDGE, 0, sent_at_s)
        chat = [*chat[1:], 1]
    assert world.expected(second) == 300 // BLOCK_TOKENS * BLOCK_TOKENS


def test_without_token_ids_a_session_that_grows_stands_for_them() -> None:
    world = World()
    world.serve(ask(None, 120, session="s"), 0, answer_tokens=30)
    assert world.expected(ask(None, 180, session="s")) == 150
    assert world.expected(ask(None, 180, session="t")) == 0
    assert world.expected(ask(None, 180)) == 0
    assert world.expected(ask(None, 100, session="s")) == 0, "another conversation has begun"
    assert world.expected(ask(None, 180, session="s", caller="ben")) == 0


def test_replicas_that_are_gone_are_forgotten() -> None:
    world, chat = World(), ids_of(16, 100)
    for where in (EDGE, CLOUD):
        world.serve(ask(chat), 0, where=where)
    world.affinity.keep_only({CLOUD})
    assert world.expected(ask(chat)) == 0
    assert world.expected(ask(chat), CLOUD) == 99


def test_the_table_is_bounded_and_forgets_the_ends_of_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("_BLOCKS", 40), ("_SESSIONS", 5), ("_REMEMBERED", 5)):
        monkeypatch.setattr(module, name, most)
    world, chat = World(), ids_of(17, 30 * BLOCK_TOKENS)
    world.serve(ask(chat), 0)
    for number in range(50):
        world.affinity.expected_cached(ask(ids_of(number, 64)), EDGE)
        world.serve(ask(None, 50, session=str(number)), 0)
    world.serve(ask(ids_of(18, 20 * BLOCK_TOKENS)), 0)
    held = world.affinity._held[EDGE]
    assert (len(held.blocks), len(held.sessions)) == (40, 5)
    assert len(world.affinity._chains) <= 5
    assert len(world.affinity._untold) <= 5
    assert world.expected(ask([*chat, 1])) == 20 * BLOCK_TOKENS, "the beginning is left"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(1, 300),
            st.none() | st.integers(0, 400),
            st.integers(0, 200),
            st.floats(0, 5000),
            st.booleans(),
        ),
        max_size=30,
    )
)
def test_expectations_are_never_more_than_all_but_one_token(
    served: list[tuple[int, int, int | None, int, float, bool]],
) -> None:
    world = World()
    chats = [ids_of(number % 2, 300) for number in range(6)]
    for chat, length, cached, answer_tokens, pause_s, by_session in served:
        ids = chats[chat][:length]
        request = ask(None, length, session=str(chat)) if by_session else ask(ids)
        assert 0 <= world.expected(request) <= length - 1
        world.serve(request, cached, answer_tokens)
        world.clock.pass_s(pause_s)
    for ids in chats:
        assert 0 <= world.expected(ask(ids)) <= 299
