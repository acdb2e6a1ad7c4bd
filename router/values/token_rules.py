"""What a caller asks of single tokens, checked against the model that is to draw them."""

from __future__ import annotations

from router.base.errors import InvalidRequest
from router.values.sampling import SamplingParams


def ending_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end an answer.

    Args:
        eos_ids: those that end a turn of the model.
    """
    own = frozenset() if params.ignore_eos else eos_ids
    return own.union(params.stop_token_ids) if params.stop_token_ids else own


def check_token_rules(params: SamplingParams, vocab_size: int, eos_ids: frozenset[int]) -> None:
    """Refuse rules that no token of a model can follow.

    Raises:
        InvalidRequest: a token id outside of the vocabulary, or no token left that may be drawn.
    """
    named = {
        "logit_bias": (token for token, _ in params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, tokens in named.items():
        highest = max(tokens, default=-1)
        if highest >= vocab_size:
            raise InvalidRequest(
                f"`{name}`: token id {highest} is outside of the model's vocabulary of {vocab_size}", param=name
            )
    if params.min_tokens and params.allowed_token_ids:
        ends = ending_ids(params, eos_ids)
        if ends.issuperset(params.allowed_token_ids):
            raise InvalidRequest(
                f"`allowed_token_ids`: all of them end the answer, which `min_tokens` = {params.min_tokens} forbids",
                param="allowed_token_ids",
            )
