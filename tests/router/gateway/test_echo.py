"""The prompt in front of its answer, also where this tier has no tokenizer for it."""

from __future__ import annotations

from typing import NoReturn

import pytest

from router.base.errors import InvalidRequest
from router.gateway.echo import echo_of
from router.values.logprobs import TokenLogprob
from router.values.prompt import TextPrompt, TokenPrompt
from router.values.prompt_size import no_tokenizer
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from tests.support.gateway_fakes import FAMILY, replica_info

PROMPT = TokenPrompt((7, 8, 9))


class NoTokenizer:
    """What counts the prompts of a tier that only passes them on."""

    def tokenizer(self, model: str) -> NoReturn:
        raise no_tokenizer(model, [replica_info()])


def asked(*, scored: bool) -> ApiRequest:
    return ApiRequest(FAMILY, PROMPT, SamplingParams(logprobs=1, prompt_logprobs=scored), echo=True)


def test_a_prompt_of_token_ids_is_told_by_who_scores_it() -> None:
    echo = echo_of(NoTokenizer(), asked(scored=True), PROMPT)  # type: ignore[arg-type]
    told = [
        TokenLogprob("<s>", None, b"<s>", shown=False),
        TokenLogprob("caf\ufffd", -1.0, b"caf\xc3"),
        TokenLogprob("\ufffd", -1.0, b"\xa9"),
        TokenLogprob(" is", -0.5),
    ]
    assert echo.before(told) == "café is"


def test_where_nobody_tells_it_it_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        echo_of(NoTokenizer(), asked(scored=False), PROMPT)  # type: ignore[arg-type]
    text = echo_of(NoTokenizer(), asked(scored=False), TextPrompt("as it was"))  # type: ignore[arg-type]
    assert text.before(()) == "as it was"
