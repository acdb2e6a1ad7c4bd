"""What the agent knows of a prompt's length before it is dispatched: counted, refused by its size, or estimated."""

from __future__ import annotations

import msgspec
import pytest

from edge_agent.generate.batcher import BatchLimits
from edge_agent.generate.turn import Turn
from edge_agent.serving.prompts import PromptCodec, PromptCounters
from edge_agent.serving.replica import LocalModel, LocalReplica
from models.text.chat import PromptEncoder
from router.base.errors import ContextTooLong
from router.values.prompt import ChatPrompt, Message, PromptSize, TextPrompt, TokenPrompt
from router.values.prompt_size import estimate_size
from router.values.replica import ReplicaInfo, SpeedPrior
from router.values.request import InferenceRequest, Objective
from router.values.sampling import SamplingParams
from tests.support.paths import REPOSITORY
from tests.support.tiny_store import TinyWorld, build_world

LONGEST_CHARS = len("<|endoftext|>")
PROSE = REPOSITORY / "LICENSE"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return build_world(tmp_path_factory.mktemp("world"))


def info(variant: str, context_tokens: int, *, family: str = "tiny", remote: bool = False) -> ReplicaInfo:
    return ReplicaInfo(
        replica_id=f"{'cloud' if remote else 'local'}/{variant}",
        endpoint="a test",
        tier="cloud" if remote else "edge",
        remote=remote,
        family=family,
        variant=variant,
        rung=0,
        quality=1.0,
        context_tokens=context_tokens,
        prior=SpeedPrior(1000.0, 100.0, source="a test"),
    )


def counters(world: TinyWorld, infos: list[ReplicaInfo]) -> PromptCounters:
    prompts = PromptCounters(lambda: infos)
    codec = PromptCodec(world.store / "tiny" / "tiny-int8")
    prompts.codecs = {"tiny": codec, "tiny-int8": codec}
    return prompts


def test_what_cannot_fit_any_window_is_refused_without_being_tokenized(
    world: TinyWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    infos = [
        info("tiny-int8", 64),
        info("tiny-fp32", 256, remote=True),
        info("other", 9999, family="other", remote=True),
    ]
    prompts = counters(world, infos)
    fits = TextPrompt("x" * 2 * 256 * LONGEST_CHARS)
    assert prompts.count("tiny", fits).tokens > len(fits.text), "what may fit upstream is counted"
    monkeypatch.setattr(PromptEncoder, "encode", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(ContextTooLong, match=r"256 tokens.*16000000 characters"):
        prompts.count("tiny", TextPrompt("x" * 16_000_000))
    with pytest.raises(ContextTooLong, match=r"64 tokens.*`tiny-int8`"):
        prompts.count("tiny-int8", fits)
    with pytest.raises(ContextTooLong, match="257 messages") as raised:
        prompts.count("tiny", ChatPrompt((Message("user", ""),) * 257))
    assert raised.value.param == "messages"


def test_many_short_turns_are_not_hopeless(world: TinyWorld) -> None:
    prompts = counters(world, [info("tiny-int8", 64)])
    assert prompts.count("tiny", ChatPrompt((Message("user", ""),) * 64)).tokens > 64


def test_a_prompt_for_a_model_of_the_upstream_is_estimated_and_says_by_how_much_it_may_be_wrong(
    world: TinyWorld,
) -> None:
    prompts = counters(world, [info("tiny-int8", 64), info("big-fp32", 8192, family="big", remote=True)])
    text = PROSE.read_text(encoding="utf-8")
    size = prompts.count("big", TextPrompt(text))
    assert size.tokens - size.slack <= len(text) / 5.2 <= size.tokens, "the densest prose of a vocabulary of 49152"
    chat = prompts.count("big", ChatPrompt((Message("user", text), Message("user", ""))))
    assert 0 <= chat.tokens - chat.slack <= size.tokens - size.slack
    assert chat.tokens > size.tokens
    assert prompts.count("huge", TextPrompt("x")).slack > 0, "whether it is served was asked before, and is asked after"


async def test_a_prompt_is_tokenized_once_on_this_device(world: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = counters(world, [info("tiny-int8", 64)])
    prompt = ChatPrompt((Message("user", "hi"),))
    size = prompts.count("tiny", prompt)
    model = LocalModel(info("tiny-int8", 64), BatchLimits(1, 16, 1), 1, pytest.fail, prompts.codecs["tiny"])
    async with LocalReplica(model, Turn()) as replica:
        ask = InferenceRequest(
            "r", "tiny", prompt, SamplingParams(), Objective(), size.tokens, 0.0, encoded=size.encoded
        )
        encoded = await replica._encode(msgspec.structs.replace(ask, encoded=None))
        more = await replica._encode(msgspec.structs.replace(ask, continuation="and"))
        assert len(more) > len(encoded), "the ids are of the prompt alone"
        monkeypatch.setattr(PromptEncoder, "encode", lambda *_: pytest.fail("tokenized again"))
        assert await replica._encode(ask) == encoded


def test_token_ids_need_no_estimate() -> None:
    assert estimate_size(TokenPrompt((1, 2, 3))) == PromptSize(3)
