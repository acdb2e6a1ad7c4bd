"""A model store and a catalogue with two rungs of a tiny random llama: everything an agent needs, in milliseconds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from edge_agent.config import EdgeConfig
from router.base.config import decode
from tests.support.tiny_llama import Sizes, write_artifact

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CATALOGUE = """
name = "tiny"
title = "A random llama"
parameters = 100_000
context_tokens = 512
licence = "none"
prepend_bos = true

[[sources]]
uri = "https://example.invalid/tiny.gguf"

[[variants]]
name = "tiny-fp32"
rung = 0
quality = 1.0
quality_measured = "the reference"
precision = "fp32"
format = "weights"

[[variants]]
name = "tiny-int8"
rung = 1
quality = 0.98
quality_measured = "made up for tests"
precision = "int8"
format = "onnx"

[[variants]]
name = "tiny-pruned-int8"
rung = 2
quality = 0.7
quality_measured = "made up for tests"
precision = "int8"
format = "onnx"
layers = [0]
"""


@dataclass(frozen=True)
class TinyWorld:
    store: Path
    catalogue: Path

    def config(self, **tables: object) -> EdgeConfig:
        """A configuration on a free port with both tiny rungs; `tables` lie over it."""
        tree: dict[str, dict[str, object]] = {
            "gateway": {"port": 0},
            "agent": {"drain_deadline_s": 10.0},
            "models": {
                "store": str(self.store),
                "catalogue": str(self.catalogue),
                "variants": ["tiny-int8", "tiny-pruned-int8"],
                "preload": ["tiny-int8"],
                "context_tokens": 256,
                "intra_op_threads": 1,
            },
        }
        for name, table in tables.items():
            tree[name] = {**tree.get(name, {}), **table}  # type: ignore[dict-item]
        return decode(tree, EdgeConfig, source="test")


def build_world(root: Path) -> TinyWorld:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIALS, *alphabet])}
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    for variant, layers, seed in (("tiny-int8", 2, 7), ("tiny-pruned-int8", 1, 8)):
        directory = write_artifact(
            root / "store" / "tiny" / variant, Sizes(layers=layers, vocab=len(vocab), context=512, seed=seed), (1,)
        )
        backend.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        _finish(directory, variant)
    catalogue = root / "catalogue"
    catalogue.mkdir()
    (catalogue / "tiny.toml").write_text(CATALOGUE)
    return TinyWorld(root / "store", catalogue)


def _finish(directory: Path, variant: str) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest |= {"variant": variant, "prepend_bos": True, "bos_token_id": 1}
    for name in ("tokenizer.json", "chat_template.jinja"):
        raw = (directory / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    (directory / "manifest.json").write_text(json.dumps(manifest))
