"""Tokenizing equals the tokenizers library, from each kind of file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from models.text.tokenizer import Tokenizer
from router.base.errors import ArtifactError, InvalidRequest
from tests.support.tiny_tokenizer import SPECIALS, backend

BACKEND = backend()
TOKENIZER = Tokenizer(BACKEND, eos_ids=[2], bos_id=1, adds_bos=False)
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40)


@given(IDS)
def test_decode_equals_the_library(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == BACKEND.decode(ids, skip_special_tokens=True)


@given(st.text())
def test_encode_then_decode_is_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert ids == BACKEND.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids) == text


def test_special_tokens_are_not_text_and_added_ones_are() -> None:
    think = BACKEND.token_to_id("<think> x")
    assert think is not None
    ids = TOKENIZER.encode("<|im_start|>the<think> x<|im_end|>")
    assert ids[0] == 1
    assert ids[-2:] == [think, 2]
    assert TOKENIZER.decode(ids) == "the<think> x"
    assert TOKENIZER.token_of(2) == "<|im_end|>"
    assert TOKENIZER.piece(10**6) == b""


def test_half_a_surrogate_pair_is_the_callers_error() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        TOKENIZER.encode("a\ud83d")


def test_save_and_read_again(tmp_path: Path) -> None:
    made = Tokenizer(BACKEND, eos_ids=[2, 0], bos_id=1, adds_bos=True)
    made.save(tmp_path)
    read = Tokenizer.load(tmp_path)
    assert (read.eos_ids, read.eos_id, read.bos_id, read.adds_bos) == (frozenset({0, 2}), 2, 1, True)
    assert read.encode("the cat 2024 <|im_end|>") == made.encode("the cat 2024 <|im_end|>")


@pytest.mark.parametrize(
    ("files", "eos", "bos", "adds"),
    [
        ({}, set(), None, False),
        ({"manifest.json": {"eos_token_ids": [2], "bos_token_id": 1, "prepend_bos": True}}, {2}, 1, True),
        ({"config.json": {"eos_token_id": 0, "bos_token_id": 1}}, {0}, 1, False),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": [2, 0]}}, {0, 2}, None, False),
        (
            {"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"}},
            {2},
            1,
            False,
        ),
        ({"tokenizer_config.json": {"bos_token": "<|im_start|>", "add_bos_token": True}}, set(), 1, True),
    ],
)
def test_ends_of_turn_come_from_the_files_beside(
    tmp_path: Path, files: dict[str, object], eos: set[int], bos: int | None, adds: bool
) -> None:
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    for name, tree in files.items():
        (tmp_path / name).write_text(json.dumps(tree))
    read = Tokenizer.from_directory(tmp_path)
    assert (read.eos_ids, read.bos_id, read.adds_bos) == (eos, bos, adds)


def test_a_post_processor_that_adds_the_first_token_is_noticed(tmp_path: Path) -> None:
    made = backend()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|im_start|>"}')
    read = Tokenizer.from_directory(tmp_path)
    assert read.adds_bos
    assert read.encode("the") == BACKEND.encode("the").ids


def test_what_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match="not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    other = backend()
    other.decoder = decoders.Metaspace()
    other.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtifactError, match="decoder is Metaspace; only byte-level"):
        Tokenizer.from_directory(tmp_path)


def write_gguf(path: Path, *, model: str = "gpt2", pre: str = "smollm", merges: list[str] | None = None) -> Path:
    tree = json.loads(BACKEND.to_str())
    vocab = BACKEND.get_vocab(with_added_tokens=True)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    user_defined = vocab["<think> x"]
    kinds = [3 if token < len(SPECIALS) else 4 if token == user_defined else 1 for token in range(len(vocab))]
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or [" ".join(merge) for merge in tree["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(value=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf_metadata_make_the_same_tokenizer(tmp_path: Path) -> None:
    read = Tokenizer.load(write_gguf(tmp_path / "a.gguf"))
    assert (read.eos_ids, read.eos_id, read.bos_id, read.adds_bos) == (frozenset({0, 2}), 2, 1, True)
    for text in ("the cat ran 2024 times<think> x\n<|im_end|>", "größe 東京 🙂", "  spaces\t\n", ""):
        assert read.encode(text) == TOKENIZER.encode(text)
        assert read.decode(read.encode(text)) == TOKENIZER.decode(TOKENIZER.encode(text))


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "in 2024's", ["in", "Ġ2024", "'s"]),
        ("smollm", "in 2024's", ["in", "Ġ", "2", "0", "2", "4", "'s"]),
        ("llama-bpe", "in 2024's", ["in", "Ġ", "202", "4", "'s"]),
        ("qwen2", "in 2024's", ["in", "Ġ", "2", "0", "2", "4", "'s"]),
    ],
)
def test_words_of_each_pre_tokenizer(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    read = Tokenizer.load(write_gguf(tmp_path / "a.gguf", pre=pre))
    assert [word for word, _ in read._backend.pre_tokenizer.pre_tokenize_str(text)] == words
    assert read.decode(read.encode(text)) == text


def test_the_file_of_a_tokenizer_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    made = backend()
    made.decoder = decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtifactError, match="decoder is Metaspace") as refused:
        Tokenizer.load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in refused.value.message


def test_gguf_tokenizers_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="its tokenizer is `llama`; only byte-level BPE"):
        Tokenizer.load(write_gguf(tmp_path / "a.gguf", model="llama"))
    with pytest.raises(ArtifactError, match="pre-tokenizer `falcon` is unknown; known: gpt-2, smollm"):
        Tokenizer.load(write_gguf(tmp_path / "a.gguf", pre="falcon"))
    with pytest.raises(ArtifactError, match="its merges do not fit its tokens"):
        Tokenizer.load(write_gguf(tmp_path / "a.gguf", merges=["zzz qqq"]))


@pytest.mark.real_model
def test_smollm2_from_gguf() -> None:
    """The ids are those that Hugging Face's own tokenizer gives (its default system prompt, digits one by one)."""
    root = Path(os.environ["OVERSPILL_MODELS"]) / "smollm2-135m" / "source"
    tokenizer = Tokenizer.load(next(root.glob("*.gguf")))
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.eos_ids, tokenizer.bos_id, tokenizer.adds_bos) == (frozenset({2}), 1, False)
    assert tokenizer.encode("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
                            "<|im_end|>\n") == [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198
    ]  # fmt: skip
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]
    for text in ("Ünïcödé 東京 🙂\r\n\ttabs  and   spaces", "def f(x):\n    return x**2  # 1,234.5"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.process
def test_the_online_modules_stay_light() -> None:
    code = (
        "import sys, models.text.tokenizer, models.text.chat, models.catalogue.families, models.store.store;"
        "light = set(sys.modules);"
        "import models.formats.weights; heavy = {'torch', 'onnx', 'onnxruntime', 'gguf', 'httpx', 'transformers'};"
        "print(sorted(heavy & set(sys.modules)), 'numpy' in light)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[] False"


@pytest.mark.real_model
def test_tokenizer_and_template_need_40_mb(tmp_path: Path) -> None:
    root = Path(os.environ["OVERSPILL_MODELS"]) / "smollm2-135m" / "source"
    Tokenizer.load(next(root.glob("*.gguf"))).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code = (
        "import sys, psutil; me = psutil.Process(); before = me.memory_info().rss;"
        "from pathlib import Path; from models.text.chat import PromptEncoder; import router.values.prompt as prompts;"
        "encoder = PromptEncoder.load(Path(sys.argv[1]));"
        "encoder.encode(prompts.ChatPrompt((prompts.Message('user', 'Hello there'),)));"
        "print(me.memory_info().rss - before)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 40_000_000
