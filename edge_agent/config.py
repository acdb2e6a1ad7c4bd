"""The agent's configuration: `examples/edge.toml` documents every key.

Values come from the file, then from `OVERSPILL_EDGE__SECTION__KEY` variables, then from flags.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from edge_agent.mqtt.config import FleetConfig
from models.pipelines.declared.settings import PipelineSettings, check_pipelines
from models.pipelines.settings import ModelBatching
from router.base.config import Flag, decode, file_of, load, overlay
from router.base.credentials import MAX_PRIORITY, key_ceilings, resolved, url_fault
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
from router.upstream.settings import BackendSettings, check_backends
from router.values.settings import RouterSettings

ENV_PREFIX = "OVERSPILL_EDGE"

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Megabits = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

_METERED_POLL_S = 30.0


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[agent]`.

    Attributes:
        profile: a hardware profile by name, or `auto`.
        profiles_dir: a directory of further profiles; same names replace the built-in ones.
        drain_deadline_s: how long streams in flight may go on after SIGTERM.
        health_interval_s: how often temperature, memory and throttling are read.
        cache_dir: where the agent keeps its own copies of the model files that it maps into memory; empty is
            $CACHE_DIRECTORY (which systemd sets), else $XDG_CACHE_HOME/overspill, else ~/.cache/overspill.
    """

    profile: str = "auto"
    profiles_dir: str = ""
    drain_deadline_s: Seconds = 20.0
    health_interval_s: Seconds = 2.0
    cache_dir: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "console", "json"] = "auto"

    def cache_path(self, environ: Mapping[str, str] = os.environ) -> Path:
        """Return the folder of private copies; it need not exist."""
        if self.cache_dir:
            return Path(self.cache_dir).expanduser()
        given = environ.get("CACHE_DIRECTORY", "").split(":")[0]  # systemd lists several with colons between
        home = Path(given) if given else Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "overspill"
        return home / "serving"


class GatewaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[gateway]`.

    Attributes:
        host: an address to listen on. Anything but loopback needs `api_keys`.
        port: 0 picks a free one and logs it.
        api_keys: accepted bearer tokens of 16 characters or more; a value `env:NAME` is read from the environment;
            each may be followed by its own `max_priority`: `"env:NAME priority=5"`.
        keys_file: tenants, their limits and digests of their keys (`router.tenants.keys_file`), read again whenever it
            changes; empty: there is none.
        max_priority: the highest priority that callers may claim; higher ones are lowered to it, and the reply says so.
        max_requests: requests inside the gateway at once, streams included.
    """

    host: str = "127.0.0.1"
    port: Port = 8600
    api_keys: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    keys_file: str = ""
    max_priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1024
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1024, le=1 << 40)] = 16 * 1024 * 1024


class LocalModels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[models]`; a value of 0 or an empty one leaves the choice to the hardware profile.

    Attributes:
        store: the model store; empty is OVERSPILL_MODELS, else ~/.cache/overspill/models.
        variants: catalogue variants to serve from this device, any order; none makes the agent a pure router.
        preload: variants to load at start; the others load with their first request. None: the first of `variants`.
        allow_provider_fallback: serve on the CPU where the profile's accelerator is missing, and say so; else refuse.
        unload_idle_s: free the memory of a model that had no request for so long; 0 never does.
        keep_kv: each model keeps the KV caches of ended answers while nobody needs their slots, so that the next turn
            of a chat computes only what is new; for the same API key alone, and for ten idle minutes at most.
        batching: how inputs of stateless models, such as sentence encoders, are gathered into batches.
    """

    store: str = ""
    variants: tuple[str, ...] = ("smollm2-135m-int8", "smollm2-135m-pruned-int8")
    preload: tuple[str, ...] | None = None
    catalogue: str = ""
    kv_slots: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    context_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    intra_op_threads: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    queue_limit: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    prefill_chunk_tokens: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    allow_provider_fallback: bool = True
    unload_idle_s: Annotated[float, msgspec.Meta(ge=0, le=31_536_000)] = 0.0
    keep_kv: bool = True
    batching: ModelBatching = ModelBatching()

    def __post_init__(self) -> None:
        for name, listed in (("variants", self.variants), ("preload", self.at_start)):
            twice = sorted({variant for variant in listed if listed.count(variant) > 1})
            if twice:
                raise ValueError(f"{name} lists {', '.join(twice)} twice")
        unknown = sorted(set(self.at_start) - set(self.variants))
        if unknown:
            raise ValueError(f"preload names {', '.join(unknown)}, which models.variants does not list")

    @property
    def at_start(self) -> tuple[str, ...]:
        """Variants to load at start."""
        return self.variants[:1] if self.preload is None else self.preload


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[upstream]`: the tier that takes over what this device cannot do.

    Attributes:
        url: base URL of its gateway, e.g. `https://cloud.example:8700`, without credentials; empty: there is none.
        api_key: bearer token; `env:NAME` is read from the environment.
        ca_file, client_cert, client_key: PEM files for a private authority and mutual TLS.
        idle_poll_interval_s: between two looks at its load and health once it was not used for a minute; 0: as
            `poll_interval_s`, and 30 s where the link is metered.
        uplink_mbps, downlink_mbps: megabits a second, believed until some were measured, and again when none was for
            long.
        price_per_mbyte: what a megabyte on the link costs, either way, in answers of full quality; 0: it is not
            metered.
    """

    url: str = ""
    api_key: str = ""
    poll_interval_s: Seconds = 1.0
    idle_poll_interval_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0
    connect_timeout_s: Seconds = 2.0
    ca_file: str = ""
    client_cert: str = ""
    client_key: str = ""
    uplink_mbps: Megabits = 10.0
    downlink_mbps: Megabits = 100.0
    price_per_mbyte: Price = 0.0

    def __post_init__(self) -> None:
        fault = url_fault(self.url) if self.url else ""
        if not fault and self.url.rstrip("/").endswith("/v1"):
            fault = (
                f"`{self.url}` ends in /v1: give the base URL of the gateway alone, as in https://cloud.example:8700"
            )
        if fault:
            raise ValueError(f"upstream.url: {fault}")

    @property
    def unused_poll_s(self) -> float:
        """Seconds between two polls of an upstream that nobody uses; 0: as many as between any two.

        One poll a second is two gigabytes a month, more than many a metered link is paid for.
        """
        chosen = self.idle_poll_interval_s
        return _METERED_POLL_S if chosen == 0 and self.price_per_mbyte > 0 else chosen


class EdgeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an agent can be told; every section may be left out."""

    agent: AgentSettings = AgentSettings()
    gateway: GatewaySettings = GatewaySettings()
    tls: TlsSettings = TlsSettings()
    grpc: GrpcSettings = GrpcSettings()
    cors: CorsSettings = CorsSettings()
    media: MediaSettings = MediaSettings()
    models: LocalModels = LocalModels()
    pipelines: tuple[PipelineSettings, ...] = ()
    upstream: UpstreamSettings = UpstreamSettings()
    backends: tuple[BackendSettings, ...] = ()
    router: RouterSettings = RouterSettings()
    decisions: DecisionFileSettings = DecisionFileSettings()
    tenants: TenantSettings = TenantSettings()
    cache: CacheSettings = CacheSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    jobs: JobsSettings = JobsSettings()
    fleet: FleetConfig = FleetConfig()

    def __post_init__(self) -> None:
        check_backends(self.backends)
        check_pipelines(self.pipelines)
        self.grpc.check_beside(self.gateway.port, "gateway.port")

    @property
    def certificates(self) -> tuple[str, ...]:
        """Files of what ends some day: certificates that it shows, and a list of revoked ones; some are empty."""
        fleet = self.fleet.tls.cert_file if self.fleet.tls is not None else None
        shown = (self.upstream.client_cert, *(to.client_cert for to in self.backends))
        return (self.tls.cert_file, self.tls.client_crl_file, fleet or "", *shown)


def load_config(
    path: Path | None,
    *,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Flag] | None = None,
) -> EdgeConfig:
    """Read a configuration; without a file, defaults with the environment and the flags over them.

    Raises:
        ConfigError: a key, a value or their combination is wrong.
    """
    if path is None:
        tree = overlay({}, ENV_PREFIX, environ, flags)
        config = decode(tree, EdgeConfig, source="environment and flags")
    else:
        config = load(path, EdgeConfig, env_prefix=ENV_PREFIX, environ=environ, flags=flags)
    load_policy(config.router.policy)
    if not is_loopback(config.gateway.host) and not (config.gateway.api_keys or config.gateway.keys_file):
        raise ConfigError(
            f"gateway.host {config.gateway.host} can be reached from other machines: set gateway.keys_file "
            "or gateway.api_keys (or OVERSPILL_EDGE__GATEWAY__API_KEYS='[\"…\"]'), or bind 127.0.0.1",
            param="gateway.api_keys",
        )
    return config


def key_sources(gateway: GatewaySettings, environ: Mapping[str, str] = os.environ) -> KeySources:
    """Return where the keys that open the gateway come from.

    Raises:
        ConfigError: one is not set, or too short to be one; no key is ever in the message.
    """
    words: list[tuple[str, str]] = []
    for index, entry in enumerate(gateway.api_keys):
        at = f"gateway.api_keys[{index}]"
        key, _, priority = entry.partition(" priority=")
        words.append((at, resolved(key.rstrip(" "), at, environ)))
        words += [(at, f"priority={priority.strip()}")] if priority else []
    fixed = [clear_key(key, priority) for key, priority in key_ceilings(words, "gateway.api_keys").items()]
    path = file_of(gateway.keys_file)
    return KeySources(tuple(fixed), path, gateway.max_priority)
