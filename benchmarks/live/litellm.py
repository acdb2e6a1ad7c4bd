"""LiteLLM's proxy over the same two tiers: its latency-based strategy, each tier the fallback of the other.

It gets what it can use: the callers' headers are passed on, so that a tier refuses a promise that it cannot keep at
once, and the other one is asked. Retries on the same tier are off: they would only wait.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from benchmarks.live.client import MODEL, Target
from benchmarks.live.tiers import LOCAL_ONLY
from benchmarks.live.venvs import installed
from examples.demo.processes import Child, free_port
from examples.demo.stack import API_KEY, Stack

VERSION = "1.106.2"
_KEY = "sk-benchmark-0123456789"


def install() -> Path:
    """Return LiteLLM's command, installed once (about 750 MB); raises RuntimeError where it cannot be."""
    return installed("litellm-venv", [f"litellm[proxy]=={VERSION}"], "litellm")


class LiteLlm:
    """Use as `async with`; the proxy is a process of its own."""

    def __init__(self, folder: Path, stack: Stack, command: Path) -> None:
        self.port = free_port()
        self._config = folder / "litellm.json"
        self._stack = stack
        argv = [str(command), "--config", str(self._config), "--host", "127.0.0.1", "--port", str(self.port)]
        env = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "CRITICAL", "LITELLM_TELEMETRY": "False"}
        self._child = Child("LiteLLM", argv, folder / "litellm.log", env)

    async def __aenter__(self) -> Target:
        self._config.write_text(json.dumps(configuration(self._stack.edge_url, self._stack.cloud_url)))
        self._child.start()
        try:
            await self._child.wait_ready(f"http://127.0.0.1:{self.port}/health/liveliness", 120)
        except BaseException:
            self._child.kill()
            raise
        return Target("litellm", f"http://127.0.0.1:{self.port}", key=_KEY)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._child.stop(grace_s=10)
        finally:
            self._child.kill()


def configuration(edge_url: str, cloud_url: str) -> dict[str, object]:
    """Return the proxy's configuration; YAML holds JSON."""

    def deployment(name: str, url: str, key: str, headers: dict[str, str] | None = None) -> dict[str, object]:
        parameters: dict[str, object] = {
            "model": f"text-completion-openai/{MODEL}",
            "api_base": f"{url}/v1",
            "api_key": key,
        }
        return {
            "model_name": name,
            "litellm_params": {**parameters, "extra_headers": headers} if headers else parameters,
        }

    def edge(name: str) -> dict[str, object]:
        return deployment(name, edge_url, "none", LOCAL_ONLY)

    def cloud(name: str) -> dict[str, object]:
        return deployment(name, cloud_url, API_KEY)

    return {
        "model_list": [edge(MODEL), cloud(MODEL), edge("edge"), cloud("cloud")],
        "router_settings": {
            "routing_strategy": "latency-based-routing",
            "num_retries": 0,
            "fallbacks": [{MODEL: ["cloud", "edge"]}],
        },
        "general_settings": {"forward_client_headers_to_llm_api": True, "master_key": _KEY},
        "litellm_settings": {"num_retries": 0, "request_timeout": 60, "telemetry": False},
    }
