"""The cloud tier's configuration.

Its tables: `[server]`, `[tls]`, `[grpc]`, `[cors]`, `[media]`, `[[models]]`, `[[pipelines]]`, `[[backends]]`,
`[router]`, `[scaling]`, `[jobs]`, `[decisions]`, `[telemetry]`, `[auth]`, `[tenants]`, `[cache]`, `[limits]`.
`examples/cloud.toml` documents every key. Environment variables lie over the file
(`OVERSPILL_CLOUD__SERVER__PORT=8701`), flags over both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cloud_tier.engines.settings import CloudBackend
from cloud_tier.scaling.settings import ScalingSettings
from models.pipelines.declared.settings import PipelineSettings, check_pipelines
from models.pipelines.settings import ModelBatching
from router.base import config
from router.base.credentials import MAX_PRIORITY, key_ceilings
from router.base.errors import ConfigError
from router.base.loopback import is_loopback
from router.cache.settings import CacheSettings
from router.decisions.settings import DecisionFileSettings
from router.gateway.grpc.settings import GrpcSettings
from router.gateway.http.settings import CorsSettings
from router.gateway.links import MediaSettings
from router.gateway.tls.settings import TlsSettings
from router.jobs.settings import JobsSettings
from router.policy.registry import load_policy
from router.tenants.keys_file import clear_key
from router.tenants.settings import TenantSettings
from router.tenants.tenancy import KeySources
from router.tracing.settings import TelemetrySettings
from router.upstream.settings import check_backends
from router.values.settings import RouterSettings

ENV_PREFIX = "OVERSPILL_CLOUD"

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Cores = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the tier listens, and how it starts and ends.

    Attributes:
        host: an address of this machine; anything but loopback demands API keys.
        port: 0 takes a free one and logs it.
        drain_s: how long streams in flight may go on after SIGTERM.
        warm_up: measure each engine's speed before it serves; without it, the catalogue's figures are the prior.
        models_dir: the model store; None takes `OVERSPILL_MODELS`, then `~/.cache/overspill/models`.
        log_format: `auto` writes text to a terminal and JSON to anything else.
    """

    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8700
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 30.0
    warm_up: bool = True
    models_dir: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine.

    Attributes:
        variant: a name of the catalogue; a family's name means its best variant that has weights.
        path: instead of `variant`: a Hugging Face directory (config.json, safetensors, tokenizer.json).
        name: what to call the model of `path`; None takes the directory's name.
        family, rung, quality: where the model of `path` stands on a ladder; None for `family` takes `name`.
        engine: `torch` is the embedded one, `vllm` starts a vLLM server; `auto` takes vLLM for a `path` where it is
            installed and torch finds a GPU.
        tensor_parallel: ranks, one process each; at most the model's number of KV heads.
        device: `auto` takes CUDA where torch finds a GPU.
        dtype: `auto` is bfloat16 on CUDA and on CPUs that multiply it themselves, else float32.
        threads: of a rank, or of each of an encoder's instances; None shares the cores that this process may use
            between all ranks and instances, and lets an engine of one rank find out how many are idle (see
            `cloud_tier.engine.threads`).
        max_running, token_budget, kv_cache_tokens: as in `cloud_tier.engine.protocol.EngineConfig`; None sizes them:
            the cache by the memory that is left, see `lineup`.
        gpus: which GPUs the ranks take, e.g. `["2", "3"]`, one for each rank, as in CUDA_VISIBLE_DEVICES; empty lets
            `cloud_tier.gpus` choose by free memory, so that engines share a GPU only when all are taken.
        draft: a model that drafts for this one: a variant, or a Hugging Face directory, with the same vocabulary. It
            takes memory and time of its own; None drafts out of what was said before.
        draft_tokens: as in `cloud_tier.engine.protocol.EngineConfig`; None is 4 with a `draft`, else 0.
        batching: of a sentence encoder: how its inputs become batches.
        max_context_tokens, prefix_caching, step_timeout_s, start_timeout_s: as in
            `cloud_tier.engine.protocol.EngineConfig`. A sentence encoder's process is ended where a batch takes longer
            than `step_timeout_s`, or its start than `start_timeout_s`, and begun anew.
    """

    variant: str | None = None
    path: str | None = None
    name: str | None = None
    family: str | None = None
    rung: Annotated[int, msgspec.Meta(ge=0, le=99)] = 0
    quality: Fraction = 1.0
    engine: Literal["auto", "torch", "vllm"] = "auto"
    tensor_parallel: Cores = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = "auto"
    max_running: Count | None = None
    token_budget: Tokens | None = None
    kv_cache_tokens: Tokens | None = None
    max_context_tokens: Tokens | None = None
    threads: Cores | None = None
    draft: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    draft_tokens: Annotated[int, msgspec.Meta(ge=0, le=32)] | None = None
    prefix_caching: bool = True
    step_timeout_s: Seconds = 60.0
    start_timeout_s: Seconds = 300.0
    gpus: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    batching: ModelBatching = ModelBatching()

    def __post_init__(self) -> None:
        """Check what the types cannot say; msgspec puts the entry's path in front of a ValueError."""
        if (self.variant is None) == (self.path is None):
            raise ValueError(f"give either `variant` or `path`, not {'both' if self.path else 'neither'}")
        if self.gpus and len(self.gpus) != self.tensor_parallel:
            raise ValueError(
                f"`gpus` names {len(self.gpus)} for tensor_parallel = {self.tensor_parallel}: one for each rank"
            )
        if self.variant is not None and (self.name is not None or self.family is not None):
            raise ValueError(f"`name` and `family` go with `path`; `{self.variant}` has its own in the catalogue")
        for key, text in (("name", self.served_name), ("family", self.family or self.served_name)):
            if not _NAME.fullmatch(text):
                raise ValueError(f"`{key}` = {text!r}: use letters, digits and . _ - (at most 100); set `{key}`")

    @property
    def served_name(self) -> str:
        """What callers ask for: the catalogue's name, `name`, or the directory's."""
        return self.variant or self.name or Path(self.path or "").resolve().name

    @property
    def label(self) -> str:
        return self.variant or self.path or "an entry without a model"


class AuthConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the accepted bearer keys are; the keys themselves never stand in the configuration.

    Attributes:
        keys_file: tenants, their limits and digests of their keys (`router.tenants.keys_file`), read again whenever it
            changes; `overspill cloud keys` writes it. A line may also be a key in clear, perhaps with `priority=5`.
        keys_env: an environment variable with keys, separated by commas or blanks; each may have its `priority=5`.
        max_priority: the highest priority that callers may claim; higher ones are lowered to it, and the reply says so.
    """

    keys_file: str | None = None
    keys_env: str = "OVERSPILL_CLOUD_API_KEYS"
    max_priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What callers may cost before an engine sees them.

    Attributes:
        max_body_bytes: larger bodies are refused with 413.
        body_timeout_s: a body that takes longer to arrive is refused with 408.
        header_timeout_s: a request head that takes longer to arrive is refused with 408.
        keep_alive_s: an idle connection is closed after so long.
        max_connections: open connections; further ones are told to come back, and closed.
        max_requests: requests in the tier at once, streams included; the next is shed with 429.
        send_stall_s: a client that reads nothing for so long is taken for gone.
    """

    max_body_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 16 * 1024 * 1024
    body_timeout_s: Seconds = 60.0
    header_timeout_s: Seconds = 15.0
    keep_alive_s: Seconds = 75.0
    max_connections: Count = 8192
    max_requests: Count = 4096
    send_stall_s: Seconds = 60.0


class CloudConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything `overspill cloud serve` can be told."""

    server: ServerConfig = ServerConfig()
    tls: TlsSettings = TlsSettings()
    grpc: GrpcSettings = GrpcSettings()
    cors: CorsSettings = CorsSettings()
    media: MediaSettings = MediaSettings()
    models: tuple[ModelConfig, ...] = ()
    pipelines: tuple[PipelineSettings, ...] = ()
    backends: tuple[CloudBackend, ...] = ()
    router: RouterSettings = RouterSettings()
    scaling: ScalingSettings = ScalingSettings()
    jobs: JobsSettings = JobsSettings()
    decisions: DecisionFileSettings = DecisionFileSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    auth: AuthConfig = AuthConfig()
    tenants: TenantSettings = TenantSettings()
    cache: CacheSettings = CacheSettings()
    limits: LimitsConfig = LimitsConfig()

    def __post_init__(self) -> None:
        """Check what the types cannot say."""
        check_backends(self.backends)
        check_pipelines(self.pipelines)
        self.grpc.check_beside(self.server.port, "server.port")
        wait_s, start_s = self.router.max_wait_ms / 1e3, self.scaling.cold_start_s
        if self.scaling.min_replicas == 0 and wait_s < start_s:
            raise ValueError(
                f"scaling.min_replicas = 0 lets requests wait for a replica that takes {start_s:g} s to start "
                f"(scaling.cold_start_s), and router.max_wait_ms = {self.router.max_wait_ms:g} ends their wait before: "
                f"set it to {1500 * start_s:g}"
            )

    @property
    def certificates(self) -> tuple[str, ...]:
        """Files of what ends some day: certificates that it shows, and a list of revoked ones; some are empty."""
        return (self.tls.cert_file, self.tls.client_crl_file, *(to.client_cert for to in self.backends))


def load(
    path: Path | None,
    *,
    flags: Mapping[str, config.Flag] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> CloudConfig:
    """Read the file, or take the defaults where there is none; then the environment, then flags.

    Args:
        flags: dotted key → option; those without a value are skipped.

    Raises:
        ConfigError: a key is unknown, or a value does not fit.
    """
    if path is not None:
        found = config.load(path, CloudConfig, env_prefix=ENV_PREFIX, environ=environ, flags=flags)
    else:
        tree = config.overlay({}, ENV_PREFIX, environ, flags)
        found = config.decode(tree, CloudConfig, source="flags and environment")
    load_policy(found.router.policy)
    return found


def key_sources(auth: AuthConfig, environ: Mapping[str, str] = os.environ) -> KeySources:
    """Return where keys come from.

    Raises:
        ConfigError: a key of the environment is too short to be one; no key is ever in the message.
    """
    words = [(f"${auth.keys_env}", word) for word in re.split(r"[,\s]+", environ.get(auth.keys_env, "")) if word]
    fixed = [clear_key(key, priority) for key, priority in key_ceilings(words, "auth.keys_env").items()]
    path = None if auth.keys_file is None else Path(auth.keys_file).expanduser()
    return KeySources(tuple(fixed), path, auth.max_priority)


def require_keys(server: ServerConfig, auth: AuthConfig, keys: KeySources) -> None:
    """Refuse to open a tier to the network that anyone could use.

    Raises:
        ConfigError: `host` is not loopback and there is no key; names the remedy.
    """
    if keys.fixed or keys.path is not None or is_loopback(server.host):
        return
    raise ConfigError(
        f"server.host = {server.host!r} is reachable from other machines, and no API key is set. Put one into "
        f"${auth.keys_env} (for example: export {auth.keys_env}=$(openssl rand -hex 24)), name a file with "
        "auth.keys_file, or bind to 127.0.0.1",
        param="auth.keys_file",
    )


def replace_models(tree: CloudConfig, names: Sequence[str], changes: Mapping[str, object]) -> CloudConfig:
    """Lay the model flags of the command line over the configuration.

    Args:
        names: catalogue names or directories; empty keeps the configured models.
        changes: fields of `ModelConfig` to set on every model; None values are skipped.

    Raises:
        ConfigError: a value does not fit.
    """
    models = tree.models
    if names:
        configured = {model.served_name: model for model in tree.models}
        models = tuple(configured.get(name) or _named(name) for name in names)
    given = {key: value for key, value in changes.items() if value is not None}
    laid = config.Overlaid({"models": [{**msgspec.structs.asdict(model), **given} for model in models]})
    for index in range(len(models)):
        laid.origins |= {("models", index, key): (f"--{key.replace('_', '-')}", None) for key in given}
    merged = config.decode(laid, CloudConfig, source="flags")
    return msgspec.structs.replace(tree, models=merged.models)


def _named(name: str) -> ModelConfig:
    is_directory = os.sep in name or Path(name).is_dir()
    return ModelConfig(path=name) if is_directory else ModelConfig(variant=name)
