"""What `edge check` and `edge profile` print: the agent's view of itself, before it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from edge_agent.batching.manifest import EncoderManifest, read_encoder_manifest
from edge_agent.config import EdgeConfig, LocalModels, UpstreamSettings, key_sources
from edge_agent.device.health import HealthReader
from edge_agent.device.memory import available_bytes
from edge_agent.mqtt.config import FleetConfig
from edge_agent.runtime.manifest import Artifact, read_manifest, verify_files
from edge_agent.runtime.protocol import RuntimeRequest
from edge_agent.serving.declared import Machine, declared_models
from edge_agent.serving.local_models import Shelf, describe_runtime, effective_settings, local_models, runtime_options
from edge_agent.serving.memory_plan import need_of, reduced, slots_that_fit
from edge_agent.serving.replica import LocalModel
from edge_agent.serving.stateless import StatelessModel
from hardware_profiles.facts import read_facts
from hardware_profiles.loader import BUILTIN_DIR, Hardware, PowerMode, Profile, ProfileMatch, choose_profile
from router.base.config import file_of
from router.base.credentials import secret
from router.base.errors import ArtifactError, ConfigError, ReplicaUnreachable, in_words
from router.base.loopback import in_url
from router.base.tls import client_context
from router.decisions.settings import describe
from router.gateway.check import check_surface
from router.gateway.listener import bind
from router.jobs.opening import check_jobs
from router.tenants.tenancy import check_usage_database
from router.tracing import otlp as traces
from router.upstream.backend_check import backend_lines
from router.wire import load as wire_load

_LOOK_S = 2.0  # for an agent on this machine to say that it is one


def profile_lines(config: EdgeConfig, root: Path = Path("/")) -> Iterator[str]:
    """Describe the device and its profile.

    Raises:
        ConfigError: no profile fits.
    """
    facts = read_facts(root)
    yield f"board         {facts.board or 'none named (no device tree)'}"
    yield f"processor     {facts.cpu_model or facts.architecture}, {facts.cpu_count} cores, {facts.architecture}"
    yield f"memory        {_gib(facts.memory_bytes)}"
    if facts.gpu is not None:
        capability = ".".join(map(str, facts.gpu.compute_capability))
        yield f"GPU           {facts.gpu.name}, compute capability {capability}, {_gib(facts.gpu.memory_bytes)}"
    if facts.l4t:
        yield f"L4T           {facts.l4t}"
    match = _matched(config, root)
    profile = match.profile
    yield f"profile       {profile.name}: {profile.title}"
    yield f"because       {match.reason}"
    if profile.generic:
        yield (
            f"              nobody has measured this board: threads, slots and window are fitted to {facts.cpu_count} "
            f"cores and {_gib(facts.memory_bytes)}"
        )
        yield (
            f"own profile   copy {BUILTIN_DIR / profile.name}.toml into the directory of agent.profiles_dir under "
            "another name, and set `name`, [match] and `generic = false` in it (docs/hardware.md)"
        )
    figures = ", ".join(_figures(profile.hardware))
    if figures:
        yield f"figures       {figures}"
    if profile.power_modes:
        yield f"power modes   {', '.join(map(_mode, profile.power_modes))}"
    yield f"runtime       {describe_runtime(profile.runtime)}"
    serving = profile.serving
    slots = f"{serving.kv_slots} KV slots of {serving.context_tokens} tokens"
    yield f"serving       {slots}, queue of {serving.queue_limit}"
    for prior in profile.priors:
        yield (
            f"prior         {prior.parameters / 1e6:.0f}M {prior.precision}: "
            f"decode {prior.decode_tokens_per_s:g} tok/s, prefill {prior.prefill_tokens_per_s:g} tok/s ({prior.source})"
        )
    health = HealthReader(profile, root).read()
    near = health.nearest
    heat = "no thermal sensor"
    if near is not None:
        limits = f"throttles at {near.throttles_at_c:.0f}, powers off at {profile.thermal.critical_c:g}"
        heat = f"{near.zone} {near.temperature_c:.0f} °C ({limits})"
    power = "no power monitor"
    if health.power_w is not None:
        power = f"{health.power_w:.1f} W ({' + '.join(health.power_rails)})"
    mode = health.power_mode or "unknown"
    yield f"now           {_gib(health.memory_available_bytes)} free, {heat}, power mode {mode}, {power}"


def check_lines(config: EdgeConfig, root: Path = Path("/")) -> Iterator[str]:
    """Say what `edge run` would do, after checking everything it needs that can be checked without loading.

    Raises:
        OverspillError: it could not run; says what to do.
    """
    match = _matched(config, root)
    yield f"profile   {match.profile.name} ({match.reason})"
    keys = key_sources(config.gateway).directory()
    secret(config.upstream.api_key, "upstream.api_key")
    access = "open to this machine only" if keys.open else f"{len(keys)} API key(s)"
    check_surface(config.tls, config.grpc, config.cors, keyless=keys.open)
    host, port = in_url(config.gateway.host), config.gateway.port
    beside = _try_address(config)
    yield f"gateway   http{'s' if config.tls.enabled else ''}://{host}:{port}, {access}"
    if config.grpc.enabled:
        yield f"grpc      {host}:{config.grpc.beside(port)}, KServe V2"
    if beside:
        yield f"warning   {beside}"
    check_usage_database(config.tenants)
    check_jobs(config.jobs)
    shelf = Shelf.open(config.models)
    settings = effective_settings(config.models, match.profile)
    for model in local_models(config.models, match.profile, shelf):
        info = model.info
        if model.fault:
            raise ArtifactError(f"{info.variant}: {model.fault}")
        directory = shelf.store.artifact_dir(info.variant)
        stateless = isinstance(model, StatelessModel)
        manifest: Artifact = read_encoder_manifest(directory) if stateless else read_manifest(directory)
        verify_files(directory, manifest)
        size = sum(file.bytes for file in manifest.files.values())
        when = "loaded at start" if info.variant in settings.at_start else "loaded with its first request"
        yield (
            f"model     {info.variant}: rung {info.rung}, quality {info.quality:g}, {size / 2**20:.0f} MiB, digests "
            f"verified, {when}"
        )
        if isinstance(model, LocalModel):
            yield from _memory_lines(model, directory, settings, match.profile)
        else:
            yield _batch_line(model, read_encoder_manifest(directory))
    yield from _pipeline_lines(config, match.profile, shelf)
    if not config.models.variants and not config.pipelines:
        yield "model     none: this agent routes everything to its upstream and its backends"
    yield from _upstream_lines(config.upstream)
    for label, text in backend_lines(config.backends):
        yield f"{label:<9} {text}"
    yield _fleet_line(config.fleet)
    yield f"policy    {config.router.policy}"
    yield f"decisions {describe(config.decisions)}"
    yield f"traces    {traces.describe(config.telemetry)}"
    yield "ok"


def _try_address(config: EdgeConfig) -> str:
    """Take the addresses and give them back; say so where an agent that runs has them: a check beside it is no fault.

    Raises:
        ConfigError: another process has one, or it is not of this machine.
    """
    host, port = config.gateway.host, config.gateway.port
    try:
        bind(host, port, "gateway").close()
        if config.grpc.enabled:
            bind(host, config.grpc.beside(port), "grpc").close()
    except ConfigError as error:
        if error.param not in {"gateway.port", "grpc.port"} or not _agent_at(config):
            raise
        return f"an agent runs at {host}:{port} already: this configuration is in force once that one was restarted"
    return ""


def _agent_at(config: EdgeConfig) -> bool:
    """Whether an agent answers at the address of a configuration: its page of readiness tells its load."""
    scheme = "https" if config.tls.enabled else "http"
    try:
        with httpx.Client(verify=False, trust_env=False, timeout=_LOOK_S) as client:  # noqa: S501 - nothing is believed
            reply = client.get(f"{scheme}://{in_url(config.gateway.host)}:{config.gateway.port}/health/ready")
    except httpx.HTTPError:
        return False
    return wire_load.HEADER in reply.headers


def _pipeline_lines(config: EdgeConfig, profile: Profile, shelf: Shelf) -> Iterator[str]:
    """Check the declared pipelines, and say what each takes and gives.

    Raises:
        ConfigError: a stage is wrong.
        ArtifactError: a model of one is missing.
    """
    machine = Machine(shelf.store, runtime_options(config.models, profile), config.models.allow_provider_fallback)
    for model in declared_models(config.pipelines, machine):
        info, signature = model.info, model.info.signature
        if model.fault or signature is None:
            raise ArtifactError(f"{info.variant}: {model.fault}")
        yield (
            f"pipeline  {info.variant}: rung {info.rung} of {info.family}, quality {info.quality:g}, "
            f"{' → '.join(stage.name for stage in model.settings.stages)}, loaded at start"
        )
        yield f"          {', '.join(map(str, signature.inputs))} → {', '.join(map(str, signature.outputs))}"


def _fleet_line(fleet: FleetConfig) -> str:
    """Try every file that the agent would read, and whether it could keep its state; changes nothing.

    Raises:
        ConfigError: a file is missing or holds something else, or the folder cannot be written to.
    """
    if not fleet.enabled:
        return "fleet     not joined"
    fleet.password()
    if fleet.tls is not None:
        fleet.tls.context()
    state = fleet.state_path()
    there = next(folder for folder in (state, *state.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"fleet.state_dir: cannot use {state}: {there} is no folder that this user may write to; name another one",
            param="fleet.state_dir",
        )
    address = fleet.address()
    return f"fleet     {address.fleet}/{address.device} at {fleet.host}:{fleet.port}, state in {state}"


def _memory_lines(model: LocalModel, directory: Path, settings: LocalModels, profile: Profile) -> Iterator[str]:
    """Say what a model takes of the memory; too little now is a warning, for `run` waits until there is enough."""
    info = model.info
    request = RuntimeRequest(
        directory, profile.runtime, settings.kv_slots, settings.context_tokens, settings.prefill_chunk_tokens
    )
    need = need_of(read_manifest(directory), request)
    yield (
        f"          {settings.kv_slots} slots of {info.context_tokens} tokens: at most "
        f"{settings.kv_slots * need.slot_bytes / 2**20:.0f} MiB of KV cache, used as it fills; with weights and "
        f"workspace {need.total_bytes(settings.kv_slots) / 2**20:.0f} MiB; first guess "
        f"{info.prior.decode_tokens_per_s:.0f} tok/s"
    )
    try:
        slots = slots_that_fit(info.variant, need, settings.kv_slots, available_bytes())
    except ReplicaUnreachable as error:
        yield f"warning   {error.message}"
    else:
        if slots < settings.kv_slots:
            yield f"warning   {reduced(info.variant, need, settings.kv_slots, slots)}"


def _batch_line(model: StatelessModel, manifest: EncoderManifest) -> str:
    """Say how a stateless model gathers batches, and what it takes of the memory."""
    batching = model.batching
    needed_bytes = manifest.needed_bytes(batching.max_tokens, batching.instances)
    return (
        f"          {batching.instances} instance(s), batches of {batching.max_size} inputs and {batching.max_tokens} "
        f"tokens at most: up to {needed_bytes / 2**20:.0f} MiB"
    )


def profile_as_json(config: EdgeConfig, root: Path = Path("/")) -> dict[str, Any]:
    """Return what the machine says of itself, its profile, why it is this one, and how the device is doing.

    Raises:
        ConfigError: no profile fits.
    """
    match = _matched(config, root)
    found = {
        "facts": read_facts(root),
        "profile": match.profile,
        "reason": match.reason,
        "health": HealthReader(match.profile, root).read(),
    }
    tree: dict[str, Any] = msgspec.to_builtins(found)
    return tree


def check_as_json(config: EdgeConfig, root: Path = Path("/")) -> dict[str, Any]:
    """Return what `check_lines` says, by its first word: a list of lines each; `warning` holds what does not stop it.

    Raises:
        OverspillError: it could not run; says what to do.
    """
    tree: dict[str, Any] = {"ok": True, "warning": []}
    label = ""
    for line in check_lines(config, root):
        head, _, text = line.partition(" ")
        label = head or label
        if text:
            tree.setdefault(label, []).append(text.strip())
    return tree


def _upstream_lines(settings: UpstreamSettings) -> Iterator[str]:
    """Say what the upstream serves; whatever it answers now, the agent would start."""
    if not settings.url:
        yield "upstream  none: what this device cannot do is refused"
        return
    yield f"upstream  {settings.url}"
    files = (file_of(settings.ca_file), file_of(settings.client_cert), file_of(settings.client_key))
    key = secret(settings.api_key, "upstream.api_key")
    tls = client_context(*files) if settings.url.startswith("https:") else False
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(verify=tls, headers=headers, trust_env=False, timeout=settings.connect_timeout_s) as client:
            reply = client.get(f"{settings.url.rstrip('/')}/v1/models")
            listed = reply.json()["data"] if reply.status_code == httpx.codes.OK else []
        served = ", ".join(sorted(str(card["id"]) for card in listed))
    except httpx.HTTPError as error:
        yield f"warning   the upstream cannot be reached now ({in_words(error)}); until then, this device is alone"
        return
    except (ValueError, KeyError, TypeError):
        yield "warning   the upstream's list of models cannot be read: is it an Overspill gateway?"
        return
    if reply.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        yield f"warning   the upstream does not accept upstream.api_key (HTTP {reply.status_code})"
    elif reply.status_code != httpx.codes.OK:
        yield f"warning   the upstream answers HTTP {reply.status_code} to /v1/models: is it an Overspill gateway?"
    else:
        yield f"          reached, serves {served or 'nothing yet'}"


def _matched(config: EdgeConfig, root: Path) -> ProfileMatch:
    return choose_profile(config.agent.profile, read_facts(root), file_of(config.agent.profiles_dir))


def _figures(hardware: Hardware) -> Iterator[str]:
    """What the data sheet of this device class says."""
    if hardware.cpu_cores:
        yield f"{hardware.cpu_cores} cores"
    if hardware.memory_bytes:
        yield f"{_gib(hardware.memory_bytes)} of memory"
    if hardware.memory_bytes_per_s:
        yield f"{hardware.memory_bytes_per_s / 1e9:g} GB/s"
    if hardware.int8_dense_tops:
        yield f"{hardware.int8_dense_tops:g} dense INT8 TOPS"
    if hardware.cuda_compute_capability:
        yield f"compute capability {hardware.cuda_compute_capability}"


def _mode(mode: PowerMode) -> str:
    watts = f" ({mode.watts:g} W)" if mode.watts else ""
    return f"{mode.name}{watts} ×{mode.speed:g}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
