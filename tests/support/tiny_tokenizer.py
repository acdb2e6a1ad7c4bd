"""A tokenizer that is trained in a moment."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, pre_tokenizers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["the cat sat on the mat, the cat ran 2024 times", "größe naïve 東京 🙂🙃 über", "stop STOP end. End.\n\n"] * 4


def backend() -> tokenizers.Tokenizer:
    """A small byte-level BPE with SmolLM2's special tokens and word splitting."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([tokenizers.AddedToken("<think> x", special=False, normalized=False)])
    return made
