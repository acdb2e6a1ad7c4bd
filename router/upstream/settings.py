"""The `[[backends]]` table of either tier: servers of other makers, and further tiers, behind this one's router."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from router.base.credentials import url_fault
from router.values.feature import Feature
from router.values.sampling import SamplingParams
from router.values.task import GENERATES, Task

Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Speed = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
# Names end in our own reply headers, logs and metrics.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[!-~]*$")]
_BACKEND_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


TaskName = Literal["generate", "embed", "rerank", "score", "transcribe", "translate", "speak"]
MODALITIES: Mapping[str, Feature] = {"image": Feature.IMAGES, "audio": Feature.AUDIO}


_METRICS_PORT = re.compile(r":[0-9]{1,5}/\S*")
_SAMPLING = frozenset(SamplingParams.__struct_fields__)


class KServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[backends.kserve]`: how the models of a KServe V2 server take text and return it.

    Attributes:
        text_input, text_output: names of the tensors; a model without both is no text model.
        endpoint: `generate_stream` and `generate` are Triton's, `infer` every server's; `auto` takes what a model can.
        spelling: a sampling parameter's name here → there: an input, or else a request parameter; empty: not sent. What
            is neither listed nor an input is sent only where every model may be told it (`max_tokens`, `temperature`,
            `top_p`); requests that need another go elsewhere.
        accumulates: each piece of a stream repeats the text before it.
        echoes: an answer begins with its prompt.
        metrics_url: where Triton exports its load; a port and path are the server's own.
    """

    text_input: Name = "text_input"
    text_output: Name = "text_output"
    endpoint: Literal["auto", "generate_stream", "generate", "infer"] = "auto"
    spelling: dict[str, str] = {}
    accumulates: bool = False
    echoes: bool = False
    metrics_url: str = ":8002/metrics"

    def __post_init__(self) -> None:
        """Check what the types cannot say; msgspec puts the table's path in front of a ValueError."""
        unknown = sorted(self.spelling.keys() - _SAMPLING)
        if unknown:
            known = ", ".join(sorted(_SAMPLING))
            raise ValueError(f"`spelling`: {unknown[0]!r} is no sampling parameter; these are: {known}")
        if self.metrics_url and not _METRICS_PORT.fullmatch(self.metrics_url):
            fault = url_fault(self.metrics_url, "no key: metrics are read without one")
            if fault:
                raise ValueError(f"`metrics_url`: {fault}; or give a port and path, as `:8002/metrics`")


class BackendModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[[backends.models]]`: what a model that a server serves is to this tier.

    Attributes:
        served: the server's own name of it.
        variant: what callers ask for, and what the catalogue is asked about; None takes `served`.
        family, rung, quality: its place on a ladder; None takes the catalogue's, else the top of a family of its own.
        context_tokens: window; None takes what the server says.
        slots: sequences that it runs at once; None takes what the server says, or what it was seen to do.
        prefill_tokens_per_s, decode_tokens_per_s: its speed alone; None measures it, or assumes one.
        tasks: what it does; None takes what the server says, else `generate`. `embed` serves /v1/embeddings, `rerank`
            and `score` the paths of that name, `transcribe`, `translate` and `speak` those below /v1/audio. The speed
            of one that does not generate is not measured.
        modalities: what chats with it may hold beside text: `image`, `audio`; None takes what the server says, else
            tries, and learns from a refusal.
        chat_template: for a server that takes text alone: a Hugging Face folder or a GGUF file, whose chat template
            makes text of conversations; empty takes the store's, where the model is known and its source is there.
    """

    served: Name
    variant: Name | None = None
    family: Name | None = None
    rung: Annotated[int, msgspec.Meta(ge=0, le=99)] | None = None
    quality: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    context_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    slots: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    prefill_tokens_per_s: Speed | None = None
    decode_tokens_per_s: Speed | None = None
    chat_template: str = ""
    tasks: Annotated[tuple[TaskName, ...], msgspec.Meta(min_length=1)] | None = None
    modalities: tuple[Literal["text", "image", "audio"], ...] | None = None

    @property
    def does(self) -> frozenset[Task] | None:
        """Return `tasks` as the router knows them."""
        if self.tasks is None:
            return None
        found = frozenset(Task(name) for name in self.tasks)
        return GENERATES if found == GENERATES else found

    @property
    def takes(self) -> frozenset[Feature] | None:
        """Return `modalities` as the router knows them."""
        if self.modalities is None:
            return None
        return frozenset(MODALITIES[name] for name in self.modalities if name in MODALITIES)


class BackendSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of `[[backends]]`: one server, or several that serve the same.

    Attributes:
        name: unique in the tier; the replicas' ids begin with it.
        kind: `openai` (vLLM, SGLang, TGI, llama.cpp, Ollama, TensorRT-LLM, a hosted API), `kserve` (Triton, KServe V2)
            or `overspill` (another tier).
        urls: base URLs without credentials.
        dns: instead of `urls`: a base URL whose host stands for a server at each address that it resolves to, as a
            headless service of Kubernetes does.
        file: instead of `urls`: a file with one base URL a line; `#` begins a comment.
        refresh_s: how often `dns` and `file` are read again.
        server: what an `openai` server is; `auto` asks it.
        api_key: bearer key; `env:NAME` is read from the environment.
        ca_file, client_cert, client_key: PEM files for a private authority and mutual TLS.
        local: it runs on this very device, so that `local-only` requests may go there.
        device: what it computes on, where it shares that with other replicas of this tier: see `ReplicaInfo.device`.
        version: what the operator calls that which serves there, e.g. an image's tag: a canary may go by it.
        warm_up: measure its speed before it serves, with a few short requests; without it, a speed is assumed.
        kserve: what is particular to kind `kserve`.
        role: `prefill` or `decode`: two entries of one name, one of each, serve together. Prompts whose computation
            would hold up the answers of `decode` are computed by `prefill`: see `router.upstream.disaggregated`.
        kv_connector: how keys and values get from one to the other: vLLM's `NixlConnector`, or its `ExampleConnector`
            over a folder that both can write.
        models: which of its models to route to, and what they are here; empty takes all.
    """

    name: str
    kind: Literal["openai", "kserve", "overspill"] = "openai"
    urls: tuple[str, ...] = ()
    dns: str = ""
    file: str = ""
    refresh_s: Seconds = 5.0
    server: Literal["auto", "vllm", "sglang", "llama.cpp", "ollama", "plain"] = "auto"
    api_key: str = ""
    ca_file: str = ""
    client_cert: str = ""
    client_key: str = ""
    connect_timeout_s: Seconds = 2.0
    poll_interval_s: Seconds = 1.0
    local: bool = False
    device: str = ""
    version: Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[!-~]*$")] = ""
    warm_up: bool = True
    kserve: KServeSettings = KServeSettings()
    role: Literal["", "prefill", "decode"] = ""
    kv_connector: Literal["nixl", "shared-folder"] = "nixl"
    models: tuple[BackendModel, ...] = ()

    def __post_init__(self) -> None:
        """Check what the types cannot say; msgspec puts the entry's path in front of a ValueError."""
        if not _BACKEND_NAME.fullmatch(self.name):
            raise ValueError(f"`name` = {self.name!r}: use letters, digits and . _ - (at most 64)")
        self._check_addresses()
        if self.kind != "kserve" and self.kserve != KServeSettings():
            raise ValueError(f"backend {self.name}: [backends.kserve] is for kind `kserve`, not for kind `{self.kind}`")
        if self.role and self.kind in {"kserve", "overspill"}:
            raise ValueError(f"backend {self.name}: `role` is for vLLM servers, not for kind `{self.kind}`")
        other = [model.served for model in self.models if model.tasks not in {None, ("generate",)} or model.modalities]
        if other and self.kind != "openai":
            raise ValueError(
                f"backend {self.name}: `tasks` or `modalities` of {', '.join(other)} is for kind `openai`, not for "
                f"kind `{self.kind}`"
            )
        served = [model.served for model in self.models]
        twice = sorted({name for name in served if served.count(name) > 1})
        if twice:
            raise ValueError(f"backend {self.name}: `models` lists {', '.join(twice)} twice")

    def _check_addresses(self) -> None:
        given = [key for key in ("urls", "dns", "file") if getattr(self, key)]
        if len(given) != 1:
            named = " and ".join(f"`{key}`" for key in given) or "none"
            raise ValueError(f"backend {self.name}: give one of `urls`, `dns` and `file`; here is {named}")
        for url in self.urls or ((self.dns,) if self.dns else ()):
            fault = url_fault(url, "its `api_key`")
            if fault:
                raise ValueError(f"backend {self.name}: {given[0]}: {fault}")
        if self.dns and urlsplit(self.dns).scheme == "https":
            raise ValueError(
                f"backend {self.name}: dns: its servers are asked by their addresses, which no certificate names; "
                "use http inside the cluster, or list https URLs in `urls`"
            )


def check_backends(backends: Sequence[BackendSettings]) -> None:
    """Refuse two backends of one name, unless they are the two halves of one: prefill and decode.

    Raises:
        ValueError: there are; msgspec puts the path in front of it.
    """
    roles: dict[str, list[str]] = {}
    for backend in backends:
        roles.setdefault(backend.name, []).append(backend.role)
    twice = sorted(name for name, found in roles.items() if len(found) > 1 and sorted(found) != ["decode", "prefill"])
    if twice:
        raise ValueError(f"backends: two are called {', '.join(twice)}, so their replicas could not be told apart")
    alone = next((name for name, found in roles.items() if len(found) == 1 and found[0]), None)
    if alone is not None:
        missing = "decode" if roles[alone] == ["prefill"] else "prefill"
        raise ValueError(f'backend {alone}: a second entry of this name with role = "{missing}" is missing')
