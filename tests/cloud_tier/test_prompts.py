from __future__ import annotations

import pytest

from cloud_tier.prompts import TierPrompts
from router.base.errors import ContextTooLong, ModelNotFound
from router.values.prompt import ChatPrompt, Message, PromptSize, TextPrompt
from tests.support.fake_engine import byte_prompts, replica_info


def test_tier_prompts_count_what_the_replica_sends() -> None:
    prompts = TierPrompts({"toy": byte_prompts()}, lambda: [replica_info()])
    chat = ChatPrompt((Message("user", "Where?"),))
    assert prompts.count("toy", chat) == PromptSize(len("<user>Where?</user><assistant>"))
    with pytest.raises(ModelNotFound, match="toy"):
        prompts.count("other", chat)


def test_what_cannot_fit_is_refused_by_its_size_without_being_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = byte_prompts()
    prompts = TierPrompts(
        {"toy": encoder}, lambda: [replica_info(context_tokens=32), replica_info("toy-2", context_tokens=64)]
    )
    longest_chars = len("<|im_end|>")
    fits = TextPrompt("x" * 2 * 64 * longest_chars)
    assert prompts.count("toy", fits).tokens == len(fits.text), "what may fit is counted: the caller learns the number"
    monkeypatch.setattr(encoder, "encode", lambda prompt: pytest.fail("tokenized"))
    with pytest.raises(ContextTooLong, match=r"64 tokens.*10000000 characters"):
        prompts.count("toy", TextPrompt("x" * 10_000_000))
    with pytest.raises(ContextTooLong, match="65 messages") as raised:
        prompts.count("toy", ChatPrompt((Message("user", ""),) * 65))
    assert raised.value.param == "messages"
