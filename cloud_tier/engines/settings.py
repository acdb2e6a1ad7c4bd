"""`[[backends]]` of kind `vllm`: a vLLM server that the cloud tier itself starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from router.upstream.settings import BackendSettings, Name, Seconds

Degree = Annotated[int, msgspec.Meta(ge=1, le=4096)]

# What the tier says itself, by the key that says it; vLLM takes each also with `_` for `-`, and shortened.
_OURS = {
    "--model": "model",
    "--served-model-name": "served",
    "--host": "",
    "--port": "port",
    "--uds": "",
    "--api-key": "",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--pipeline-parallel-size": "pipeline_parallel",
    "-pp": "pipeline_parallel",
    "--data-parallel-size": "data_parallel",
    "-dp": "data_parallel",
    "--distributed-executor-backend": "executor",
    "--headless": "",
}
_OF_A_ROLE = {"--kv-transfer-config": "kv_connector"}
_ENV_OURS = {"VLLM_API_KEY": "", "CUDA_VISIBLE_DEVICES": "gpus"}
_SHORTEST = 5  # of an abbreviated flag: `--por`


class VllmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[backends.vllm]`.

    Attributes:
        model: a Hugging Face directory, or a name that vLLM can find.
        served: the model's name to callers; None takes the last part of `model`.
        executable: the `vllm` command of another environment; empty takes this interpreter's vLLM.
        tensor_parallel, pipeline_parallel, data_parallel: ranks; their product is how many GPUs it takes.
        executor: `mp` starts the ranks on this machine, `ray` on the nodes of a Ray cluster; `auto` leaves it to vLLM.
        gpus: which it takes, as in CUDA_VISIBLE_DEVICES; empty lets `cloud_tier.gpus` choose.
        port: of 127.0.0.1; 0 takes a free one at each start.
        args: further flags of `vllm serve`.
        env: over this process's own environment.
        start_timeout_s: bound on loading the model.
        silent_s: a server that answers neither probe nor request for so long is started again.
        stop_s: between SIGTERM and SIGKILL.
        kv_folder: of `kv_connector = "shared-folder"`.
    """

    model: Annotated[str, msgspec.Meta(min_length=1)]
    served: Name | None = None
    executable: str = ""
    tensor_parallel: Degree = 1
    pipeline_parallel: Degree = 1
    data_parallel: Degree = 1
    executor: Literal["auto", "mp", "ray"] = "auto"
    gpus: tuple[Annotated[str, msgspec.Meta(min_length=1)], ...] = ()
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    start_timeout_s: Seconds = 1800.0
    silent_s: Seconds = 120.0
    stop_s: Seconds = 20.0
    kv_folder: str = ""

    def __post_init__(self) -> None:
        """Check what the types cannot say; msgspec puts the entry's path in front of a ValueError."""
        refuse_flags(self.args, _OURS)
        for name in self.env:
            if name in _ENV_OURS:
                key = _ENV_OURS[name]
                raise ValueError(f"`env` sets {name}, which the tier sets itself; {_instead(key)}")
        if self.gpus and len(self.gpus) != self.ranks:
            raise ValueError(f"`gpus` names {len(self.gpus)} for {self.ranks} ranks: one for each")
        if self.gpus and self.executor == "ray":
            raise ValueError('`gpus` goes with ranks on this machine; with executor = "ray" the cluster assigns them')

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def served_name(self) -> str:
        return self.served or self.model.rstrip("/").rpartition("/")[2] or self.model

    @property
    def directory(self) -> Path | None:
        """The model's directory; None where `model` is a name."""
        folder = Path(self.model).expanduser()
        return folder if folder.is_dir() else None


class CloudBackend(BackendSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of a cloud tier's `[[backends]]`: as on any tier, or a server that this tier starts.

    Attributes:
        kind: as in `BackendSettings`; or `vllm`, which takes no address and the table `[backends.vllm]` instead.
        vllm: what to start.
    """

    kind: Literal["openai", "kserve", "overspill", "vllm"] = "openai"  # type: ignore[assignment]
    vllm: VllmSettings | None = None

    def _check_addresses(self) -> None:
        if self.kind != "vllm":
            if self.vllm is not None:
                raise ValueError(f'backend {self.name}: `vllm` goes with kind = "vllm", here it is "{self.kind}"')
            super()._check_addresses()
            return
        if self.vllm is None:
            raise ValueError(f'backend {self.name}: kind = "vllm" wants a table [backends.vllm] with `model`')
        theirs = ("urls", "dns", "file", "api_key", "ca_file", "client_cert", "client_key")
        given = [key for key in theirs if getattr(self, key)]
        if given:
            raise ValueError(
                f"backend {self.name}: `{given[0]}` goes with servers that run elsewhere; "
                'one of kind = "vllm" is started here, on 127.0.0.1, under a key of its own'
            )
        if self.role:
            refuse_flags(self.vllm.args, _OF_A_ROLE)
            if self.kv_connector == "shared-folder" and not self.vllm.kv_folder:
                raise ValueError(
                    f'backend {self.name}: kv_connector = "shared-folder" wants `kv_folder` in [backends.vllm], '
                    "a folder that both servers can write"
                )


def refuse_flags(args: Sequence[str], ours: dict[str, str]) -> None:
    """Refuse a flag of vLLM that the tier itself gives.

    Raises:
        ValueError: there is one; names the key to use.
    """
    for arg in args:
        flag = arg.partition("=")[0]
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        for known, key in ours.items():
            shortened = flag.startswith("--") and len(flag) >= _SHORTEST and known.startswith(flag)
            if flag == known or shortened:
                raise ValueError(f"`args` holds {arg}, which the tier sets itself; {_instead(key)}")


def _instead(key: str) -> str:
    return f"use the key `{key}`" if key else "leave it out"
