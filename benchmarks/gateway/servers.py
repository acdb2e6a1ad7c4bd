"""What stands before the stub engine: ours, ours of another revision, and what others put there.

Every server runs on a processor of its own; the stub and the callers share the other one.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from benchmarks.compiled import trees
from benchmarks.gateway.stub import MODEL
from benchmarks.live.litellm import install as install_litellm
from benchmarks.live.venvs import installed
from examples.demo.processes import free_port

HERE = Path(__file__).resolve().parents[2]
_START_S = 120.0
SGLANG_ROUTER = "0.3.2"
_KEY = "sk-benchmark-0123456789"


@dataclass(frozen=True)
class Command:
    """How a server is started.

    Attributes:
        ready: a path that answers with 200 once it serves.
        key: what its callers send.
        checkout: where it is started, and imports from.
    """

    name: str
    argv: Sequence[str]
    port: int
    ready: str = "/health"
    key: str = ""
    checkout: Path = HERE
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Server:
    """One that runs."""

    name: str
    port: int
    key: str
    process: psutil.Process

    def cpu_s(self) -> float:
        """Processor time that it and its children have taken."""
        total = 0.0
        for process in (self.process, *self.process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def overspill(folder: Path, name: str, upstream_port: int, checkout: Path = HERE) -> Command:
    """The edge agent without local models, before the stub as its cloud tier: what revisions of all ages can be."""
    port, config = free_port(), folder / f"{name}.toml"
    config.write_text(
        f'[agent]\nlog_format = "json"\n[gateway]\nport = {port}\n[models]\nvariants = []\npreload = []\n'
        f'[upstream]\nurl = "http://127.0.0.1:{upstream_port}"\n'
    )
    argv = [sys.executable, "overspill.py", "edge", "run", "--config", str(config)]
    return Command(name, argv, port, "/v1/models", checkout=checkout)


def overspill_compiled(folder: Path, upstream_port: int) -> Command:
    """The same with its router compiled, in a copy of its own: made in some minutes, kept while no source changes."""
    tree = trees("compiled")["compiled"]
    command = overspill(folder, "overspill-compiled", upstream_port, tree)
    return replace(command, environment={"PYTHONPATH": os.pathsep.join((str(tree), str(HERE)))})


def overspill_cloud(folder: Path, upstream_port: int) -> Command:
    """The cloud tier, before the stub as a server of another maker."""
    port, config = free_port(), folder / "cloud.toml"
    config.write_text(
        f'[server]\nport = {port}\nlog_format = "json"\n[[backends]]\nname = "stub"\nkind = "openai"\n'
        f'urls = ["http://127.0.0.1:{upstream_port}"]\n'
        f'[[backends.models]]\nserved = "{MODEL}"\nfamily = "{MODEL}"\nvariant = "{MODEL}-stub"\n'
    )
    argv = [sys.executable, "overspill.py", "cloud", "serve", "--config", str(config)]
    return Command("overspill-cloud", argv, port, "/health/ready")


def echo(folder: Path, upstream_port: int) -> Command:  # noqa: ARG001 - it asks nobody
    """Start uvicorn and Starlette alone, with the answer at hand: what a server in Python costs that does nothing."""
    port = free_port()
    return Command("echo", [sys.executable, "-m", "benchmarks.gateway.echo", str(port)], port)


def nginx(folder: Path, upstream_port: int) -> Command:
    port = free_port()
    home = folder / "nginx"
    home.mkdir()
    (home / "nginx.conf").write_text(
        f"daemon off;\nworker_processes 1;\npid {home}/nginx.pid;\nerror_log stderr crit;\n"
        "events { worker_connections 1024; }\n"
        f"http {{\naccess_log off;\nclient_body_temp_path {home}/body;\nproxy_temp_path {home}/proxy;\n"
        f"fastcgi_temp_path {home}/f;\nuwsgi_temp_path {home}/u;\nscgi_temp_path {home}/s;\n"
        f"keepalive_requests 100000000;\nupstream stub {{ server 127.0.0.1:{upstream_port}; keepalive 256; "
        "keepalive_requests 100000000; }\n"
        f"server {{\nlisten 127.0.0.1:{port} backlog=512;\nlocation / {{\nproxy_pass http://stub;\n"
        'proxy_http_version 1.1;\nproxy_set_header Connection "";\nproxy_buffering off;\n}\n}\n}\n'
    )
    return Command("nginx", ["/usr/sbin/nginx", "-p", str(home), "-c", str(home / "nginx.conf")], port)


def litellm(folder: Path, upstream_port: int) -> Command:
    port, config = free_port(), folder / "litellm.json"
    parameters = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{upstream_port}/v1", "api_key": "none"}
    config.write_text(
        json.dumps(
            {
                "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
                "general_settings": {"master_key": _KEY},
                "litellm_settings": {"num_retries": 0, "telemetry": False},
            }
        )
    )
    argv = [str(install_litellm()), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "CRITICAL", "LITELLM_TELEMETRY": "False"}
    return Command("litellm", argv, port, "/health/liveliness", _KEY, environment=quiet)


def sglang_router(folder: Path, upstream_port: int) -> Command:  # noqa: ARG001 - it takes its flags from the command line
    port, metrics = free_port(), free_port()
    command = installed("sglang-router-venv", [f"sglang-router=={SGLANG_ROUTER}", "setproctitle"], "smg")
    argv = [
        *(str(command), "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
        *("--worker-urls", f"http://127.0.0.1:{upstream_port}", "--policy", "round_robin", "--log-level", "error"),
    ]
    return Command("sglang-router", argv, port)


@contextlib.contextmanager
def running(command: Command, cores: Sequence[int], ready_for: str = MODEL) -> Iterator[Server]:
    """Run a server on some processors until the block ends; enters it once it serves.

    Args:
        ready_for: has to stand in the reply where `ready` lists models.

    Raises:
        SystemExit: it does not start; says what it wrote.
    """
    environment = {**os.environ, "PYTHONPATH": str(command.checkout), "OMP_NUM_THREADS": "1", **command.environment}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command.argv],
            cwd=command.checkout,
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            ends_s = time.monotonic() + _START_S
            while not _answers(command, ready_for):
                if process.poll() is not None or time.monotonic() > ends_s:
                    output.seek(0)
                    raise SystemExit(f"{' '.join(command.argv)} did not start:\n{output.read().decode()[-4000:]}")
                time.sleep(0.1)
            yield Server(command.name, command.port, command.key, psutil.Process(process.pid))
        finally:
            _end(process)


def _answers(command: Command, ready_for: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{command.port}{command.ready}", timeout=2) as reply:
            return reply.status == 200 and (command.ready != "/v1/models" or ready_for.encode() in reply.read())
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in psutil.wait_procs(children, timeout=3)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


@contextlib.contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    """A revision of this repository, in a temporary work tree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "checkout"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", str(tree), revision], check=True, capture_output=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
