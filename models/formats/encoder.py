"""A sentence encoder's shape and weights: a Hugging Face directory of the BERT family with mean pooling. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from models.formats.safetensors import SafetensorsFile
from router.base.errors import ArtifactError
from router.base.json_input import UNREADABLE

Array = npt.NDArray[np.float32]
Count = Annotated[int, msgspec.Meta(gt=0)]


class EncoderConfig(msgspec.Struct, frozen=True):
    """config.json of a BERT encoder; keys not named here change nothing about what it computes."""

    model_type: str
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    vocab_size: Count
    max_position_embeddings: Count
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "absolute"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


@dataclass(frozen=True)
class Matrix:
    """A linear layer: x · weight + bias, weight float32 (in, out)."""

    weight: Array
    bias: Array


@dataclass(frozen=True)
class Norm:
    """LayerNorm's gain and bias, each float32 (hidden,)."""

    gain: Array
    bias: Array


@dataclass(frozen=True)
class EncoderLayer:
    """One layer; queries, keys and values as one matrix, queries scaled by 1/√head_dim."""

    qkv: Matrix
    out: Matrix
    attention_norm: Norm
    up: Matrix
    down: Matrix
    norm: Norm


@dataclass(frozen=True)
class EncoderWeights:
    """A whole encoder.

    Attributes:
        words: float32 (vocab, hidden).
        positions: float32 (positions, hidden), the embedding of the first token type added.
    """

    config: EncoderConfig
    words: Array
    positions: Array
    norm: Norm
    layers: tuple[EncoderLayer, ...]


def read_encoder(directory: Path) -> EncoderWeights:
    """Read config.json and model.safetensors.

    Raises:
        ArtifactError: a file is missing or damaged, or the model is no BERT encoder of this kind.
    """
    config = read_encoder_config(directory)
    file = SafetensorsFile(directory / "model.safetensors")
    prefix = "bert." if "bert.embeddings.word_embeddings.weight" in file.names else ""

    def tensor(name: str) -> Array:
        return file.read(prefix + name)

    def matrix(name: str) -> Matrix:
        return Matrix(np.ascontiguousarray(tensor(f"{name}.weight").T), tensor(f"{name}.bias"))

    def norm(name: str) -> Norm:
        return Norm(tensor(f"{name}.weight"), tensor(f"{name}.bias"))

    def layer(index: int) -> EncoderLayer:
        at = f"encoder.layer.{index}"
        parts = [matrix(f"{at}.attention.self.{part}") for part in ("query", "key", "value")]
        scale = np.float32(config.head_dim**-0.5)
        parts[0] = Matrix(parts[0].weight * scale, parts[0].bias * scale)
        qkv = Matrix(
            np.concatenate([part.weight for part in parts], axis=1), np.concatenate([part.bias for part in parts])
        )
        return EncoderLayer(
            qkv=qkv,
            out=matrix(f"{at}.attention.output.dense"),
            attention_norm=norm(f"{at}.attention.output.LayerNorm"),
            up=matrix(f"{at}.intermediate.dense"),
            down=matrix(f"{at}.output.dense"),
            norm=norm(f"{at}.output.LayerNorm"),
        )

    positions = tensor("embeddings.position_embeddings.weight") + tensor("embeddings.token_type_embeddings.weight")[0]
    return EncoderWeights(
        config=config,
        words=tensor("embeddings.word_embeddings.weight"),
        positions=positions.astype(np.float32),
        norm=norm("embeddings.LayerNorm"),
        layers=tuple(layer(index) for index in range(config.num_hidden_layers)),
    )


def read_encoder_config(directory: Path) -> EncoderConfig:
    """Read config.json.

    Raises:
        ArtifactError: it is missing, or of no encoder of this kind.
    """
    path = directory / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=EncoderConfig)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}; pull the model again") from error
    except UNREADABLE as error:
        raise ArtifactError(f"{path}: no configuration of an encoder: {error}") from error
    known = (config.model_type, config.hidden_act, config.position_embedding_type)
    if known != ("bert", "gelu", "absolute"):
        raise ArtifactError(
            f"{path}: model_type, hidden_act and position_embedding_type are {', '.join(known)}; encoders that can be "
            "served have bert, gelu, absolute"
        )
    if config.hidden_size % config.num_attention_heads:
        raise ArtifactError(f"{path}: {config.num_attention_heads} heads do not divide {config.hidden_size}")
    return config
