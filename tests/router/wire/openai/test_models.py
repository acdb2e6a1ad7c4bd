"""The list of models, as clients read it."""

from __future__ import annotations

from router.values.task import Task
from router.wire.openai.models import model_cards
from tests.support.router_fakes import info


def test_models_that_generate_come_first() -> None:
    """Clients that are told no model take the first of the list, and ask it for an answer."""
    encoder = info("int8", family="a-minilm", variant="a-minilm-int8", tasks=frozenset({Task.EMBED}))
    cards = model_cards([encoder, info("int8"), info("fp32")], created_s=0)
    assert [card["id"] for card in cards] == ["tiny", "a-minilm", "tiny-fp32", "tiny-int8", "a-minilm-int8"]
