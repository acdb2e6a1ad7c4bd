"""The weights of a GGUF file as other servers want them: a Hugging Face directory in bfloat16, and a GGUF in Q8_0."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file

from models.formats.weights import open_weights


def write_hf_directory(source: Path, artifact: Path, folder: Path) -> None:
    """Write config.json, safetensors, tokenizer and chat template, unless they are there already.

    Args:
        source: a GGUF file of the llama family.
        artifact: a folder with the tokenizer's files: an ONNX artifact of the same model.
    """
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    weights = open_weights(source)
    tensors = {name: torch.tensor(weights.tensor(name)).bfloat16() for name in weights.names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (artifact / name).exists():
            shutil.copyfile(artifact / name, folder / name)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    shape = weights.config
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_context_tokens,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,  # of older releases of transformers; newer ones read the next line
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(shape.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def write_q8_0(source: Path, target: Path) -> None:
    """Write the same GGUF file with every matrix in Q8_0, unless it is there already."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    unfinished = target.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in {"general.architecture", "general.file_type"}:
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    plain = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
    for tensor in reader.tensors:
        if tensor.tensor_type in plain:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
            continue
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        packed = quants.quantize(values, GGMLQuantizationType.Q8_0)
        writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)
