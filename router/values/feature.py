"""What a request may need of a replica, and not every server does."""

from __future__ import annotations

import enum

from router.values.constraint import ConstraintKind


class Feature(enum.Enum):
    """What a request may need of a replica, and not every server does; the value is its name in messages."""

    CHAT = "chat"
    COMPLETIONS = "raw completions"
    PROMPT_IDS = "prompts of token ids"
    TOP_K = "top_k"
    PENALTIES = "presence and frequency penalties"
    REPETITION_PENALTY = "repetition_penalty"
    IGNORE_EOS = "ignore_eos"
    SEED = "seed"
    MIN_P = "min_p"
    MIN_TOKENS = "min_tokens"
    STOP_IDS = "stop_token_ids"
    LOGIT_BIAS = "logit_bias"
    ALLOWED_IDS = "allowed_token_ids"
    LOGPROBS = "logprobs"
    PROMPT_LOGPROBS = "log probabilities of the prompt"
    CONTINUED_CHAT = "continuing a chat answer that broke off"
    CONTINUED_IDS = "continuing an answer to token ids that broke off"
    JSON_SCHEMA = "answers by a JSON schema"
    REGEX = "answers by a regular expression"
    CHOICE = "answers out of a list of choices"
    LARK = "answers by a grammar in Lark's notation"
    GBNF = "answers by a grammar in llama.cpp's notation"
    CONTINUED_CONSTRAINT = "continuing a constrained answer that broke off"
    TOOLS = "tools"
    TEMPLATE_KWARGS = "chat_template_kwargs"
    CONTINUED_TOOLS = "continuing an answer with tools that broke off"
    IMAGES = "images"
    AUDIO = "audio"
    BAD_WORDS = "bad_words"
    TOKENIZE = "tokenize"


OFFERED: frozenset[Feature] = frozenset({Feature.IMAGES, Feature.AUDIO, Feature.BAD_WORDS, Feature.TOKENIZE})
"""What a replica does only where it says so (`ReplicaInfo.offers`); the rest it does unless it says not."""
MEDIA: frozenset[Feature] = frozenset({Feature.IMAGES, Feature.AUDIO})
NOTHING: frozenset[Feature] = frozenset()


FEATURE_OF = {
    ConstraintKind.JSON_SCHEMA: Feature.JSON_SCHEMA,
    ConstraintKind.REGEX: Feature.REGEX,
    ConstraintKind.CHOICE: Feature.CHOICE,
    ConstraintKind.LARK: Feature.LARK,
    ConstraintKind.GBNF: Feature.GBNF,
}
