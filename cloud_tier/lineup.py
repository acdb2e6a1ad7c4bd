"""The line-up: what each `[[models]]` entry means on this machine: weights, prompts, place on the ladder, engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cloud_tier.config import ModelConfig
from cloud_tier.engine.protocol import EngineConfig
from cloud_tier.gpus import GPU_WORKING_BYTES, GpuFinder, Wanted, assign_gpus, find_gpus, spare_bytes
from models.catalogue.families import Catalogue, Family, Variant, family_of_directory
from models.formats.config import ModelConfig as Shape
from models.formats.weights import open_weights
from models.store.store import ModelStore
from models.text.chat import PromptEncoder
from router.base.errors import ConfigError, ModelNotFound
from router.base.host import computes_bfloat16, usable_cores, usable_memory_bytes
from router.values.replica import ReplicaInfo, SpeedPrior

_DRAFT_TOKENS = 4  # where a model drafts and nobody says how many
_MAX_THREADS = 16  # further ones bring little to one matrix and cost at every barrier
# Rough figures of a server core and a data-centre GPU, for an engine nobody has measured: bytes/s and FLOP/s.
_BANDWIDTH = {"cpu": 15e9, "cuda": 800e9}
_COMPUTE = {"cpu": 60e9, "cuda": 60e12}
# An engine that nobody sized: sequences side by side, and tokens of KV cache for each on a CPU, where the cache and the
# rows of running sequences may take a quarter of the memory that is left, all engines together.
_ROWS = {"cpu": 32, "cuda": 16}
_GPU_KV_TOKENS = 16_384  # at least; and this share of what is then left of a GPU, as far as all windows need it
_GPU_KV_SHARE = 0.9
_ROW_TOKENS = 2048
_LEAST_KV_TOKENS = 4096
_KV_SHARE = 0.25
_TOKEN_BUDGET = 256
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine to start.

    Attributes:
        info: as the router shall see it; window and prior are corrected by the engine itself.
        source: the weights: a GGUF file or a Hugging Face directory, with tokenizer and chat template.
        prepend_bos: the catalogue's word for raw text; None leaves it to the model's files.
    """

    info: ReplicaInfo
    source: Path
    prepend_bos: bool | None
    engine: EngineConfig

    def prompts(self) -> PromptEncoder:
        """Read tokenizer and chat template.

        Raises:
            ArtifactError: a file is missing or damaged.
        """
        return PromptEncoder.load(self.source, prepend_bos=self.prepend_bos)


def line_up(
    entries: Sequence[ModelConfig],
    catalogue: Catalogue,
    store: ModelStore,
    gpus: GpuFinder = find_gpus,
    *,
    beside: int = 0,
) -> tuple[EngineSpec, ...]:
    """Resolve every entry, and check what can be checked before an engine starts.

    Args:
        beside: processes of other models that compute on this machine: all of them share its cores alike.

    Raises:
        ConfigError: two entries clash, or one fits neither its model nor this machine.
        ModelNotFound: the catalogue has no such model.
        ArtifactError: weights are missing or damaged; names the command that brings them.
    """
    room = _Room.of(entries, beside)
    devices = {entry.device for entry in entries}
    found = gpus(expected="cuda" in devices) if devices != {"cpu"} else ()
    specs = [_spec(entry, catalogue, store, len(found), room) for entry in entries]
    wanted = [_wanted(spec, entry) for spec, entry in zip(specs, entries, strict=True)]
    gpu_ids = assign_gpus(wanted, found)
    spare = spare_bytes(wanted, gpu_ids, found)
    specs = [
        dataclasses.replace(spec, engine=_placed(spec.engine, entry, ids, left_bytes))
        for spec, entry, ids, left_bytes in zip(specs, entries, gpu_ids, spare, strict=True)
    ]
    return tuple(_with_own_ids(specs))


def _placed(engine: EngineConfig, entry: ModelConfig, gpus: tuple[str, ...], spare_a_rank: int) -> EngineConfig:
    """Give an engine its GPUs, and a KV cache that nobody sized most of the memory that is left there."""
    cache_tokens = engine.kv_cache_tokens
    if entry.kv_cache_tokens is None and engine.device == "cuda":
        models = _models(engine)
        token_bytes = sum(_kv_numbers(model) for model in models) * _DTYPE_BYTES[engine.dtype]
        window = min(engine.max_context_tokens or models[0].max_context_tokens, models[0].max_context_tokens)
        most = max(cache_tokens, engine.max_running * window)
        cache_tokens = min(
            most, cache_tokens + int(_GPU_KV_SHARE * spare_a_rank * engine.tensor_parallel / token_bytes)
        )
    return msgspec.structs.replace(engine, gpus=gpus, kv_cache_tokens=cache_tokens)


def _models(engine: EngineConfig) -> list[Shape]:
    """The sizes of the model, and of the one that drafts for it."""
    sources = [(engine.weights, engine.layers), (engine.draft_weights, engine.draft_layers)]
    return [Source(Path(path), layers).model for path, layers in sources if path is not None]


def _wanted(spec: EngineSpec, entry: ModelConfig) -> Wanted:
    engine = spec.engine
    if engine.device == "cpu":
        return Wanted(entry.label, 0, 0, entry.gpus)
    numbers = sum(_weights(model) + _kv_numbers(model) * engine.kv_cache_tokens for model in _models(engine))
    total_bytes = numbers * _DTYPE_BYTES[engine.dtype]
    return Wanted(
        entry.label, engine.tensor_parallel, total_bytes // engine.tensor_parallel + GPU_WORKING_BYTES, entry.gpus
    )


def _kv_numbers(model: Shape) -> int:
    """Count the keys and values of one token."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim


def _weights(model: Shape) -> int:
    """Count the weights of a model."""
    per_layer = model.hidden_size * (
        2 * model.num_heads * model.head_dim + 2 * model.num_kv_heads * model.head_dim + 3 * model.intermediate_size
    )
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return model.num_layers * per_layer + embeddings


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Weights, and which of their layers to keep; None keeps all."""

    path: Path
    layers: tuple[int, ...] | None = None

    @property
    def model(self) -> Shape:
        """The sizes of what is kept."""
        return open_weights(self.path, self.layers).config


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """What each rank may have of this machine's CPU.

    Attributes:
        threads: to choose among: its share of the cores, the same with a core left to the tier and whoever calls it,
            and powers of two below.
        many_ranks: threads where ranks wait for each other: the share of all cores but one.
        kv_bytes: for keys and values.
    """

    threads: tuple[int, ...]
    many_ranks: int
    kv_bytes: int

    @classmethod
    def of(cls, entries: Sequence[ModelConfig], beside: int) -> _Room:
        ranks, cores = max(1, sum(entry.tensor_parallel for entry in entries)), usable_cores()
        few, most = (max(1, min(_MAX_THREADS, number // (ranks + beside))) for number in (cores - 1, cores))
        halves = [1 << power for power in range(few.bit_length()) if 1 << power < few]
        return cls(tuple(sorted({*halves, few, most})), few, int(_KV_SHARE * usable_memory_bytes() / ranks))


def _spec(entry: ModelConfig, catalogue: Catalogue, store: ModelStore, gpus: int, room: _Room) -> EngineSpec:
    if entry.path is not None:
        directory = Path(entry.path).expanduser()
        family = family_of_directory(directory)
        source = Source(directory.resolve())
        name, family_name = entry.served_name, entry.family or entry.served_name
        rung, quality = entry.rung, entry.quality
    else:
        variant, family = find_variant(str(entry.variant), catalogue)
        source = Source(store.source_path(family.name), variant.layers)
        name, family_name = variant.name, family.name
        rung, quality = variant.rung, variant.quality
    _check_split(entry, source)
    engine = _engine(entry, source, _draft(entry, source, catalogue, store), gpus, room)
    info = ReplicaInfo(
        replica_id=f"engine/{name}",
        endpoint=f"engine/{name}",
        tier="cloud",
        remote=False,
        family=family_name,
        variant=name,
        rung=rung,
        quality=quality,
        context_tokens=min(engine.max_context_tokens or family.context_tokens, family.context_tokens),
        prior=_rough_prior(family.parameters, engine),
        leaves_steps=engine.device == "cpu" and engine.tensor_parallel == 1,
        holds_up=True,
    )
    return EngineSpec(info, source.path, family.prepend_bos, engine)


def find_variant(name: str, catalogue: Catalogue) -> tuple[Variant, Family]:
    """Find a variant that an engine can run; a family's name means its best one.

    Raises:
        ModelNotFound: nothing is called that.
        ConfigError: the variant is an ONNX artifact.
    """
    families = {family.name: family for family in catalogue}
    if name in families:
        family = families[name]
        best = min((v for v in family.variants if v.format == "weights"), key=lambda v: v.rung, default=None)
        if best is None:
            raise ConfigError(f"family `{name}` has no variant with weights for an engine", param="models.variant")
        return best, family
    try:
        variant = catalogue.variant(name)
    except ModelNotFound as error:
        weights = [v for f in families.values() for v in f.variants if v.format == "weights"]
        known = sorted({name for v in weights for name in (v.family, v.name)})
        raise ModelNotFound(
            f"no model `{name}` in the catalogue; an engine can serve: {', '.join(known)}, "
            "or a Hugging Face directory (give its path)",
            param="models.variant",
        ) from error
    family = families[variant.family]
    if variant.format != "weights":
        usable = ", ".join(v.name for v in family.variants if v.format == "weights") or "none"
        raise ConfigError(
            f"`{name}` is an ONNX artifact for an edge runtime; an engine runs weights: {usable}",
            param="models.variant",
        )
    return variant, family


def _draft(entry: ModelConfig, of: Source, catalogue: Catalogue, store: ModelStore) -> Source | None:
    """Find the model that drafts for another.

    Raises:
        ModelNotFound, ConfigError: there is no such model, or its vocabulary is of another size.
    """
    if entry.draft is None:
        return None
    directory = Path(entry.draft).expanduser()
    if directory.is_dir():
        found = Source(directory.resolve())
    else:
        variant, family = find_variant(entry.draft, catalogue)
        found = Source(store.source_path(family.name), variant.layers)
    own, drafts = of.model.vocab_size, found.model.vocab_size
    if own != drafts:
        raise ConfigError(
            f"draft = {entry.draft!r} has a vocabulary of {drafts} tokens and {entry.label} one of {own}: name a "
            "smaller model of the same family",
            param="models.draft",
        )
    return found


def _engine(entry: ModelConfig, source: Source, draft: Source | None, gpus: int, room: _Room) -> EngineConfig:
    where = _device(entry, gpus)
    automatic = "bfloat16" if where == "cuda" or computes_bfloat16() else "float32"
    dtype = automatic if entry.dtype == "auto" else entry.dtype
    rows = entry.max_running or _ROWS[where]
    cache_tokens = entry.kv_cache_tokens
    if cache_tokens is None:
        models = [one.model for one in (source, draft) if one is not None]
        cache_tokens = _GPU_KV_TOKENS if where == "cuda" else _cpu_kv_tokens(models, dtype, rows, room)
    return EngineConfig(
        weights=str(source.path),
        layers=source.layers,
        dtype=dtype,  # type: ignore[arg-type]  # both are Literals
        device=where,
        tensor_parallel=entry.tensor_parallel,
        max_running=rows,
        token_budget=entry.token_budget or max(_TOKEN_BUDGET, 2 * rows),
        kv_cache_tokens=cache_tokens,
        max_context_tokens=entry.max_context_tokens,
        threads=_threads(entry, room),
        draft_tokens=entry.draft_tokens if entry.draft_tokens is not None else _DRAFT_TOKENS if draft else 0,
        draft_weights=str(draft.path) if draft else None,
        draft_layers=draft.layers if draft else None,
        prefix_caching=entry.prefix_caching,
        step_timeout_s=entry.step_timeout_s,
        start_timeout_s=entry.start_timeout_s,
        gpus=entry.gpus,
    )


def _threads(entry: ModelConfig, room: _Room) -> tuple[int, ...]:
    if entry.threads is not None:
        return (entry.threads,)
    return room.threads if entry.tensor_parallel == 1 else (room.many_ranks,)


def _cpu_kv_tokens(models: Sequence[Shape], dtype: str, rows: int, room: _Room) -> int:
    """Return tokens of KV cache for so many rows within a rank's share of the memory: a window, if that may be.

    Args:
        models: the one that is served, and the one that drafts for it.
    """
    # Twice: running sequences also lie in rows of their own. W8A8 keeps keys and values in two bytes.
    number_bytes = 4 if dtype == "float32" else 2
    token_bytes = sum(2 * _kv_numbers(model) * number_bytes for model in models)
    wanted = max(rows * _ROW_TOKENS, models[0].max_context_tokens)
    return max(_LEAST_KV_TOKENS, min(wanted, room.kv_bytes // token_bytes))


def _device(entry: ModelConfig, gpus: int) -> Literal["cpu", "cuda"]:
    """Choose the device.

    Raises:
        ConfigError: it has fewer GPUs than ranks. Where `gpus` names them, the ranks find that out.
    """
    if entry.device == "cpu" or (entry.device == "auto" and gpus == 0):
        return "cpu"
    if not entry.gpus and gpus < entry.tensor_parallel:
        remedy = f"use at most {gpus}, or device = 'cpu'" if gpus else "set device = 'cpu', or install its driver"
        raise ConfigError(
            f"tensor_parallel = {entry.tensor_parallel} for {entry.label} on cuda: every rank needs a GPU of its own, "
            f"and torch finds {gpus} here; {remedy}",
            param="models.tensor_parallel",
        )
    return "cuda"


def _check_split(entry: ModelConfig, source: Source) -> None:
    """Refuse more ranks than KV heads: a head is the smallest share a rank can hold.

    Raises:
        ConfigError: there are.
    """
    kv_heads = source.model.num_kv_heads
    if entry.tensor_parallel > kv_heads:
        raise ConfigError(
            f"tensor_parallel = {entry.tensor_parallel} for {entry.label}: the model has {kv_heads} KV heads, "
            f"and every rank needs one; use at most {kv_heads}",
            param="models.tensor_parallel",
        )


def _rough_prior(parameters: int, engine: EngineConfig) -> SpeedPrior:
    """Bandwidth bounds decoding (every weight is read once a token), compute bounds prefill (2 FLOP a weight)."""
    read_bytes = parameters * _DTYPE_BYTES[engine.dtype]
    ranks = engine.tensor_parallel if engine.device == "cuda" else 1
    return SpeedPrior(
        prefill_tokens_per_s=ranks * _COMPUTE[engine.device] / (2 * parameters),
        decode_tokens_per_s=ranks * _BANDWIDTH[engine.device] / read_bytes,
        source=f"estimated from {parameters / 1e6:.0f} M parameters in {engine.dtype} on {engine.device}",
    )


def _with_own_ids(specs: list[EngineSpec]) -> Iterator[EngineSpec]:
    """Number the engines of one variant, and refuse one name for two models.

    Raises:
        ConfigError: a variant's name is also another family's, or one name stands for two sources.
    """
    sources: dict[str, tuple[Path, tuple[int, ...] | None]] = {}
    counts: dict[str, int] = {}
    for spec in specs:
        name = spec.info.variant
        what = (spec.source, spec.engine.layers)
        if sources.setdefault(name, what) != what:
            raise ConfigError(f"two different models are called `{name}`: give one another `name`", param="models.name")
        if any(other.info.family == name and spec.info.family != name for other in specs):
            raise ConfigError(f"`{name}` is both a model and another model's family: rename one", param="models.name")
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > 1:
            own = f"{spec.info.replica_id}#{counts[name]}"
            yield dataclasses.replace(spec, info=dataclasses.replace(spec.info, replica_id=own, endpoint=own))
        else:
            yield spec
