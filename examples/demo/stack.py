"""A whole Overspill on this machine: broker, cloud tier (tensor parallel 2) and one edge agent, on free ports.

The demo plays on it, and the end-to-end tests do too.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from examples.demo.processes import Child, StackError, find_mosquitto, free_port, overspill

# Where `make models` puts what it prepares.
PREPARED_MODELS = Path(__file__).resolve().parents[2] / ".overspill" / "models"
FLEET = "demo"
DEVICE = "bench-1"
API_KEY = "demo-key-0123456789abcdef"

EDGE_TOML = """\
[agent]
log_format = "json"
cache_dir = "{cache}"

[gateway]
port = {edge_port}

[models]
variants = {variants}
preload = {variants}
intra_op_threads = 1
kv_slots = 4
context_tokens = 2048

[upstream]
url = "http://127.0.0.1:{cloud_port}"
api_key = "env:OVERSPILL_DEMO_KEY"
poll_interval_s = 0.5

[router]
{router}

[fleet]
enabled = true
port = {broker_port}
fleet = "{fleet}"
device = "{device}"
telemetry_interval_s = 2.0
state_dir = "{folder}/fleet"
"""

CLOUD_TOML = """\
[server]
port = {cloud_port}
log_format = "json"

[[models]]
variant = "smollm2-135m-fp32"
device = "cpu"
tensor_parallel = {tensor_parallel}
dtype = "{dtype}"
max_running = 8

[[models]]
variant = "smollm2-135m-pruned-fp32"
device = "cpu"
tensor_parallel = 1
dtype = "{dtype}"
max_running = 8

[router]
{cloud_router}
"""

BROKER_CONF = """\
listener {broker_port} 127.0.0.1
allow_anonymous true
persistence false
max_queued_messages 1000
log_type error
log_type warning
"""


def fastest_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the engines compute in: bfloat16 where the CPU multiplies it in hardware, else float32."""
    flags = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


@dataclass
class StackOptions:
    """What may differ between the demo and a test.

    Attributes:
        edge_router, cloud_router: lines of the `[router]` tables.
        edge_variants: the rungs on the device.
        tensor_parallel: ranks of the cloud's main engine.
        dtype: what the cloud's engines compute in.
    """

    edge_router: str = ""
    cloud_router: str = ""
    edge_variants: tuple[str, ...] = ("smollm2-135m-int8", "smollm2-135m-pruned-int8")
    tensor_parallel: int = 2
    dtype: str = "float32"
    broker: bool = True
    cloud: bool = True
    env: dict[str, str] = field(default_factory=dict)


class Stack:
    """Use as `async with`; on the way out every process is stopped, in the order a careful operator would."""

    def __init__(self, folder: Path, options: StackOptions | None = None) -> None:
        self.folder = folder
        self.options = options or StackOptions()
        self.edge_port, self.cloud_port, self.broker_port = free_port(), free_port(), free_port()
        self.edge_url = f"http://127.0.0.1:{self.edge_port}"
        self.cloud_url = f"http://127.0.0.1:{self.cloud_port}"
        env = {
            "OVERSPILL_DEMO_KEY": API_KEY,
            "OVERSPILL_CLOUD_API_KEYS": API_KEY,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "OVERSPILL_MODELS": os.environ.get("OVERSPILL_MODELS", str(PREPARED_MODELS)),
            **self.options.env,
        }
        self.broker = Child("mosquitto", [find_mosquitto(), "-c", self._path("mosquitto.conf")], folder / "broker.log")
        cloud = overspill("cloud", "serve", "--config", self._path("cloud.toml"))
        self.cloud = Child("the cloud tier", cloud, folder / "cloud.log", env)
        edge = overspill("edge", "run", "--config", self._path("edge.toml"))
        self.edge = Child("the edge agent", edge, folder / "edge.log", env)

    def write_configuration(self) -> None:
        """Put the three configuration files into the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {
            "folder": self.folder,
            "device": DEVICE,
            "fleet": FLEET,
            "edge_port": self.edge_port,
            "cloud_port": self.cloud_port,
            "broker_port": self.broker_port,
            "router": self.options.edge_router,
            "cloud_router": self.options.cloud_router,
            "tensor_parallel": self.options.tensor_parallel,
            "dtype": self.options.dtype,
            "variants": list(self.options.edge_variants),
            "cache": PREPARED_MODELS.parent / "serving",
        }
        edge_toml = EDGE_TOML if self.options.broker else EDGE_TOML.partition("[fleet]")[0]
        (self.folder / "edge.toml").write_text(edge_toml.format(**values))
        (self.folder / "cloud.toml").write_text(CLOUD_TOML.format(**values))
        (self.folder / "mosquitto.conf").write_text(BROKER_CONF.format(**values))

    async def __aenter__(self) -> Stack:
        self.write_configuration()
        try:
            if self.options.broker:
                self.broker.start()
                await self.broker.wait_port(self.broker_port)
            if self.options.cloud:
                self.cloud.start()
            self.edge.start()
            await self.edge.wait_ready(f"{self.edge_url}/health/ready", 90)
            if self.options.cloud:
                await self.cloud_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End every process, the edge first; interrupted, end all of them at once."""
        children = (self.edge, self.cloud, self.broker)
        try:
            for child in children:
                await child.stop()
        finally:
            for child in children:
                child.kill()

    async def cloud_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until the cloud serves and the edge sends to it: one token is asked for."""
        await self.cloud.wait_ready(f"{self.cloud_url}/health/ready", timeout_s)
        one_token = {"model": "smollm2-135m", "prompt": "Hello", "max_tokens": 1}
        async with httpx.AsyncClient(headers={"x-overspill-locality": "cloud-only"}) as client:
            for _ in range(200):
                reply = await client.post(f"{self.edge_url}/v1/completions", json=one_token, timeout=30)
                if reply.status_code == 200:
                    return
                await asyncio.sleep(0.1)
        raise StackError(f"the edge agent sends nothing to the cloud: {reply.text}; {self.edge.log_tail()}")

    def start_cloud_again(self) -> None:
        """Start the cloud tier that was killed."""
        self.cloud.start()

    def engine_pids(self) -> list[int]:
        """Every process below the cloud's server: the engines' ranks."""
        return [child.pid for child in psutil.Process(self.cloud.pid).children(recursive=True)]

    def kill_engine(self) -> int:
        """SIGKILL one engine process of the cloud; returns its pid."""
        pid = self.engine_pids()[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    async def decision(self, request_id: str) -> dict[str, Any]:
        """Why the edge sent a request where it did."""
        async with httpx.AsyncClient() as client:
            response = await client.get(f"{self.edge_url}/v1/decisions/{request_id}", timeout=5)
            response.raise_for_status()
            record: dict[str, Any] = response.json()
            return record

    def _path(self, name: str) -> str:
        return str(self.folder / name)
