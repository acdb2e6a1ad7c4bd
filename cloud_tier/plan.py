"""From a configuration to everything that a tier needs, checked against this machine before anything starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping

import msgspec

from cloud_tier.backends import plan_servers
from cloud_tier.config import CloudConfig, key_sources, require_keys
from cloud_tier.encoders.lineup import divide, line_up_encoders, processes_of
from cloud_tier.encoders.pipelines import line_up_pipelines
from cloud_tier.engines.command import ServerSpec
from cloud_tier.lineup import EngineSpec, line_up
from models.catalogue.families import Catalogue, load_catalogue
from models.pipelines.replica import ServedPipeline
from models.store.store import ModelStore, default_root
from models.store.templates import templates_in
from router.base.config import file_of
from router.base.credentials import resolved, secret
from router.base.errors import ConfigError
from router.base.extras import install
from router.decisions.settings import describe
from router.gateway.check import check_surface
from router.tenants.tenancy import KeySources
from router.tracing.otlp import describe as describe_traces
from router.values.template import Renderers, no_renderers

_ENGINE_NEEDS = ("torch", "gguf")


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Everything `serve` needs, checked: nothing in it can be wrong any more but the machine.

    Attributes:
        keys: who may come in; its file has been read once.
        usage_database: where usage is kept, empty where it is not.
        encoders: sentence encoders, which compute batches in processes of their own, and declared pipelines.
        servers: vLLM servers that the tier starts itself; each stands among the backends of `config` too.
    """

    config: CloudConfig
    specs: tuple[EngineSpec, ...]
    catalogue: Catalogue
    keys: KeySources
    usage_database: str = dataclasses.field(repr=False)
    renderers: Renderers = no_renderers
    servers: tuple[ServerSpec, ...] = ()
    encoders: tuple[ServedPipeline, ...] = ()


def make_plan(config: CloudConfig, environ: Mapping[str, str] = os.environ) -> Plan:
    """Check a configuration against this machine: keys, models, weights. Reads files; starts nothing.

    Raises:
        ConfigError: a library or a certificate is missing, the tier would be open to the network, decisions cannot be
            written, or an entry does not fit its model.
        ModelNotFound, ArtifactError: a model is unknown, or its weights are not here; names the command to run.
    """
    for entry in config.backends:
        secret(entry.api_key, f"backends.{entry.name}.api_key", environ)
    keys = key_sources(config.auth, environ)
    require_keys(config.server, config.auth, keys)
    check_surface(config.tls, config.grpc, config.cors, keyless=keys.directory().open)
    database = resolved(config.tenants.database, "tenants.database", environ)
    describe(config.decisions)
    describe_traces(config.telemetry)
    if not config.models and not config.backends and not config.pipelines:
        raise ConfigError(
            "no model to serve: name one with --model (for example: --model smollm2-135m) or in [[models]], "
            "a pipeline in [[pipelines]], or a server that has some in [[backends]]",
            param="models",
        )
    folder = config.server.models_dir
    catalogue = load_catalogue()
    store = ModelStore(file_of(folder) or default_root(), catalogue)
    generating, encoding = divide(config.models, catalogue)
    config = msgspec.structs.replace(config, models=tuple(generating))
    servers = plan_servers(config, catalogue, store)
    engines = servers.config.models
    encoders = line_up_encoders(encoding, catalogue, store, beside=sum(entry.tensor_parallel for entry in engines))
    if encoders or engines:
        _require_engine()
    encoders += line_up_pipelines(config.pipelines, catalogue, store)
    specs = line_up(engines, catalogue, store, servers.engine_gpus, beside=processes_of(encoding))
    return Plan(
        servers.config, specs, catalogue, keys, database, templates_in(catalogue, store), servers.specs, encoders
    )


def _require_engine() -> None:
    """Look for what engines import in processes of their own, where a missing library is told as an engine that died.

    Raises:
        ConfigError: names the extra and how to install it.
    """
    missing = [name for name in _ENGINE_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the cloud tier needs the extra `cloud`: {', '.join(missing)} cannot be imported; run: {install('cloud')}"
        )
