"""Run with a Python that has `ray[serve]` and Overspill: the Ray Serve application through a burst; prints JSON.

python -m tests.support.ray_burst FOLDER
"""

from __future__ import annotations

import json
import socket
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import ray
from openai.types.chat import ChatCompletionMessageParam
from ray import serve

from cloud_tier.ray_serve import app
from tests.support.fake_engine import toy_model_directory

CONFIG = """
[server]
warm_up = false
drain_s = 5.0
log_format = "json"

[[models]]
path = "{path}"
name = "toy"
device = "cpu"
max_running = 2

[scaling]
max_replicas = 2
cold_start_s = 10.0
hold_s = 5.0
"""
TOKENS = 300
REQUESTS = 40
PATIENCE_S = 240.0


def running() -> int:
    """Count the replicas that serve."""
    states = serve.status().applications["overspill"].deployments["overspill-cloud"].replica_states
    return next((count for state, count in states.items() if str(getattr(state, "value", state)) == "RUNNING"), 0)


def ask(client: openai.OpenAI) -> int:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
    reply = client.chat.completions.create(
        model="toy", messages=messages, max_tokens=TOKENS, extra_body={"ignore_eos": True}, timeout=PATIENCE_S
    )
    return reply.usage.completion_tokens


def burst(client: openai.OpenAI, seen: list[int]) -> list[int]:
    """Keep so many requests under way until a second replica has come, or patience has ended; count their tokens."""
    ends_s, tokens = time.monotonic() + PATIENCE_S, set()
    with ThreadPoolExecutor(REQUESTS) as pool:
        asked: list[Future[int]] = []
        while seen[-1] < 2 and time.monotonic() < ends_s:
            ended = [one for one in asked if one.done()]
            tokens |= {one.result() for one in ended}
            asked = [one for one in asked if one not in ended]
            asked += [pool.submit(ask, client) for _ in range(REQUESTS - len(asked))]
            time.sleep(0.5)
            seen.append(running())
        tokens |= {one.result() for one in asked}
    return sorted(tokens)


def main(folder: Path) -> dict[str, object]:
    model = toy_model_directory(folder / "toy")
    config = folder / "cloud.toml"
    config.write_text(CONFIG.format(path=model), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app({"config": str(config)}), name="overspill", route_prefix="/")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(
        model="toy", messages=[{"role": "user", "content": "Hi"}], max_tokens=8, stream=True
    )
    seen = [running()]
    told = {"models": [m.id for m in client.models.list().data], "chunks": sum(1 for _ in stream)}
    told["tokens"] = burst(client, seen)
    ends_s = time.monotonic() + PATIENCE_S
    while seen[-1] != 1 and time.monotonic() < ends_s:
        seen.append(running())
        time.sleep(0.5)
    serve.shutdown()
    ray.shutdown()
    return {**told, "replicas": [count for at, count in enumerate(seen) if at == 0 or count != seen[at - 1]]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))) + "\n")
