"""Weights: every source gives what transformers and the gguf library hold, under the same names."""

from __future__ import annotations

import copy
import json
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from models.formats.config import ModelConfig, config_from_gguf
from models.formats.gguf import GgufFile
from models.formats.safetensors import SafetensorsFile
from models.formats.weights import open_weights, rope_inverse_frequencies
from router.base.errors import ArtifactError
from tests.support.paths import REPOSITORY

torch.set_num_threads(1)
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama3": transformers.LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE, eos_token_id=[2, 5], bos_token_id=1),
    "smollm": transformers.LlamaConfig(**TINY, tie_word_embeddings=True, eos_token_id=2, bos_token_id=1),
    "qwen2": transformers.Qwen2Config(**TINY),
    "qwen3": transformers.Qwen3Config(**TINY, head_dim=16),
}


def _model(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(MODELS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which start as zeros and ones
            parameter.normal_()
    return model


@pytest.fixture(params=sorted(MODELS))
def model(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    return _model(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_hf_directory_gives_every_parameter(
    model: transformers.PreTrainedModel, tmp_path: Path, dtype: torch.dtype, shard_size: str
) -> None:
    model = model.to(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    weights = open_weights(tmp_path)
    expected = model.state_dict()
    if weights.config.tie_embeddings:
        expected.pop("lm_head.weight")
    assert set(weights.names) == set(expected)
    for name, value in expected.items():
        tensor = weights.tensor(name)
        assert tensor.dtype == np.float32
        assert tensor.flags.writeable
        np.testing.assert_array_equal(tensor, value.float().numpy())
    assert weights.parameters == model.num_parameters()


def test_config_equals_transformers(model: transformers.PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    config = open_weights(tmp_path).config
    theirs = model.config
    assert config.model_type == theirs.model_type
    assert config.num_layers == theirs.num_hidden_layers
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert config.attention_bias == (theirs.model_type == "qwen2")
    assert config.qk_norm == (theirs.model_type == "qwen3")
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    eos = theirs.eos_token_id
    assert config.eos_token_ids == (tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,))


def test_older_config_names_the_rotary_values_at_the_top(tmp_path: Path) -> None:
    _model("llama3").save_pretrained(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    new = open_weights(tmp_path).config
    rope = tree.pop("rope_parameters")
    tree["rope_theta"] = rope.pop("rope_theta")
    tree["rope_scaling"] = {**rope, "type": rope["rope_type"]}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert open_weights(tmp_path).config == new


@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}])
def test_rotary_frequencies_equal_transformers(scaling: dict[str, float] | None, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**TINY, rope_parameters=scaling)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    kind = "default" if scaling is None else str(scaling["rope_type"])
    if kind == "default":
        theirs = 1.0 / 1e4 ** (np.arange(0, 8, 2) / 8)
    else:
        theirs = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))[0].numpy()
    np.testing.assert_allclose(rope_inverse_frequencies(open_weights(tmp_path).config), theirs, rtol=1e-6)


def test_kept_layers_are_renumbered(tmp_path: Path) -> None:
    model = _model("qwen3")
    model.save_pretrained(tmp_path)
    kept = open_weights(tmp_path).keep_layers((0, 2))
    assert kept.config.num_layers == 2
    np.testing.assert_array_equal(
        kept.tensor("model.layers.1.mlp.up_proj.weight"), model.state_dict()["model.layers.2.mlp.up_proj.weight"]
    )
    assert kept.keep_layers((1,)).layers == (2,)
    with pytest.raises(ArtifactError, match="has 2 layers"):
        kept.tensor("model.layers.2.mlp.up_proj.weight")


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0), (0, 3), (-1, 0)])
def test_layers_that_cannot_be_kept(tmp_path: Path, layers: tuple[int, ...]) -> None:
    _model("smollm").save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="cannot keep layers"):
        open_weights(tmp_path).keep_layers(layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type `mamba` cannot be served; known: llama"),
        ({"hidden_act": "gelu"}, "`hidden_act` = 'gelu'"),
        ({"attention_bias": True}, "`attention_bias` = True"),
        ({"mlp_bias": True}, "`mlp_bias` = True"),
        ({"use_sliding_window": True}, "`use_sliding_window` = True"),
        ({"quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rotary scaling `yarn` cannot be served"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "the key 'factor' is missing"),
        ({"num_hidden_layers": None}, "wrong type"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_attention_heads": 0}, "at least one query head, not 0"),
        ({"num_hidden_layers": 0}, "at least one layer, not 0"),
    ],
)
def test_refused_configurations(tmp_path: Path, change: dict[str, object], message: str) -> None:
    _model("smollm").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ArtifactError, match=message) as refused:
        open_weights(tmp_path)
    assert str(path) in refused.value.message


def test_damaged_directories(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot read .*config.json"):
        open_weights(tmp_path)
    with pytest.raises(ArtifactError, match="no model at"):
        open_weights(tmp_path / "absent")
    _model("smollm").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100], b"", struct.pack("<Q", 1 << 60) + whole[8:], b"\x02" + bytes(7) + b"[]"):
        file.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"model\.safetensors"):
            open_weights(tmp_path)
    file.write_bytes(whole)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-2.safetensors"}}')
    with pytest.raises(ArtifactError, match="shards are missing: part-2"):
        open_weights(tmp_path)


@pytest.mark.process
@pytest.mark.parametrize(("dtype", "size"), [("BF16", 2), ("F16", 2), ("F32", 4), ("F64", 8)])
def test_every_float_of_safetensors_becomes_float32_without_torch(tmp_path: Path, dtype: str, size: int) -> None:
    """Numpy has no bfloat16 of its own: its 16 bits are the upper half of a float32."""
    values = np.array([0.0, 1.0, -2.5, 3.140625], np.float32)
    raw = {
        "BF16": (values.view(np.uint32) >> 16).astype("<u2"),
        "F16": values.astype("<f2"),
        "F32": values,
        "F64": values.astype("<f8"),
    }[dtype].tobytes()
    header = json.dumps({"x": {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, 4 * size]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw)
    code = (
        "import sys; from pathlib import Path; from models.formats.safetensors import SafetensorsFile; "
        f"x = SafetensorsFile(Path({str(path)!r})).read('x'); "
        "print(x.dtype, x.shape, x.ravel().tolist(), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"float32 (2, 2) {values.tolist()} False"


def test_quantized_safetensors_are_refused_by_name(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ArtifactError, match=r"`x` is F8_E4M3.*\(not quantized\)"):
        SafetensorsFile(path).read("x")
    with pytest.raises(ArtifactError, match="has no tensor `y`"):
        SafetensorsFile(path).read("y")


def test_a_tensor_of_the_wrong_shape_is_named(tmp_path: Path) -> None:
    _model("smollm").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 97}))
    with pytest.raises(ArtifactError, match=r"embed_tokens.weight` is \(96, 32\), the configuration says \(97, 32\)"):
        open_weights(tmp_path).tensor("model.embed_tokens.weight")


def _to_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_gguf(path: Path, model: transformers.PreTrainedModel, kind: gguf.GGMLQuantizationType) -> None:
    config = model.config
    writer = gguf.GGUFWriter(str(path), config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(2)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.model_type.upper()], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        value = tensor.numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            value = _to_pairs(value, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if value.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(stored, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", ["smollm", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_gguf_equals_the_model_it_was_made_of(tmp_path: Path, name: str, kind: str) -> None:
    model = _model(name)
    path = tmp_path / "model.gguf"
    quant = gguf.GGMLQuantizationType[kind]
    _write_gguf(path, model, quant)
    weights = open_weights(path)
    assert weights.config.attention_bias == (name == "qwen2")
    assert weights.config.qk_norm == (name == "qwen3")
    tolerance = {"F32": 0.0, "F16": 1e-2, "BF16": 4e-2, "Q8_0": 5e-2, "Q4_1": 0.6}[kind]
    expected = model.state_dict()
    for tensor_name in weights.names:
        got = weights.tensor(tensor_name)
        np.testing.assert_allclose(got, expected[tensor_name].numpy(), atol=tolerance, err_msg=tensor_name)
    assert weights.parameters == model.num_parameters()


def test_gguf_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write_gguf(path, _model("smollm"), gguf.GGMLQuantizationType.F32)
    whole = path.read_bytes()
    for cut in (0, 3, 10, 200, 900):
        path.write_bytes(whole[:cut])
        with pytest.raises(ArtifactError, match=r"model\.gguf"):
            open_weights(path)
    path.write_bytes(whole[:-5000])
    weights = open_weights(path)
    with pytest.raises(ArtifactError, match="truncated"):
        [weights.tensor(name) for name in weights.names]
    path.write_bytes(b"GGUF\x09\x00\x00\x00" + whole[8:])
    with pytest.raises(ArtifactError, match="version 9"):
        GgufFile(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ArtifactError, match="not a GGUF file"):
        GgufFile(path)
    path.write_bytes(whole.replace(b"token_embd", b"token_embx"))
    with pytest.raises(ArtifactError, match=r"lack 'token_embd\.weight'"):
        open_weights(path)


def test_gguf_values_that_no_model_has_are_named_with_their_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    _write_gguf(path, _model("smollm"), gguf.GGMLQuantizationType.F32)
    file = GgufFile(path)
    for key, value, told in (
        ("attention.head_count", 0, "at least one query head, not 0"),
        ("attention.head_count_kv", 3, "4 query heads cannot share 3"),
        ("attention.head_count_kv", [2, 2], "a value has the wrong type"),
    ):
        file.metadata = {**GgufFile(path).metadata, f"llama.{key}": value}
        with pytest.raises(ArtifactError, match=told) as refused:
            config_from_gguf(file)
        assert str(path) in refused.value.message


def test_odd_head_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 7 is odd"):
        ModelConfig(9, 7, 7, 1, 1, 1, 7, 1e-5, 1e4, None, 64, True, False, False, None, (), "llama")


@pytest.mark.real_model
def test_smollm2_answers_paris_in_transformers(models_root: Path) -> None:
    from models.catalogue.families import load_catalogue
    from models.store.store import ModelStore
    from models.text.chat import PromptEncoder
    from router.values.prompt import ChatPrompt, Message

    source = ModelStore(models_root, load_catalogue()).source_path("smollm2-135m")
    weights = open_weights(source)
    config = weights.config
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.max_context_tokens,
            tie_word_embeddings=config.tie_embeddings,
            eos_token_id=list(config.eos_token_ids),
            pad_token_id=0,
        )
    ).eval()
    tensors = {name: torch.from_numpy(weights.tensor(name)) for name in weights.names}
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    encoder = PromptEncoder.load(source)
    ids = encoder.encode(ChatPrompt((Message("user", "What is the capital of France?"),)))
    made = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    assert encoder.tokenizer.decode(made.tolist()) == "The capital of France is Paris."
