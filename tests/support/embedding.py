"""A sentence encoder in float32 by transformers, as its authors run it: what every rung is held against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

FAMILY = "all-minilm-l6-v2"
TEXTS = (
    "What is the capital of France?",
    "Paris is the capital of France.",
    "The agent ends its models before it leaves its listener.",
    "naïve café, 北京, 😀 and a Zürich tram",
    "a",
    "Overspill answers AI requests on the device first, and spills over to the cloud only when the device cannot keep "
    "the promise the caller asked for: the context is too long, the queue too deep, the deadline too near. " * 3,
)


def reference(source: Path, texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return unit vectors, float32 (B, H): mean pooling over the tokens of each text, computed alone."""
    import torch
    from transformers import AutoTokenizer, BertModel

    tokenizer, model = AutoTokenizer.from_pretrained(source), BertModel.from_pretrained(source).eval()
    rows = []
    for text in texts:
        encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            rows.append(model(**encoded).last_hidden_state[0].mean(dim=0))
    vectors = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
    found: npt.NDArray[np.float32] = vectors.numpy()
    return found
