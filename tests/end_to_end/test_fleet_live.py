"""Configuration over MQTT, from the operator's command to the next request on the device."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx
import openai
import pytest

from examples.demo.processes import overspill
from examples.demo.stack import DEVICE, FLEET, Stack

pytestmark = [pytest.mark.real_model, pytest.mark.broker]

CHAT: dict[str, Any] = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


def _fleet(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = overspill("fleet", *arguments, "--fleet", FLEET, "--broker", f"127.0.0.1:{stack.broker_port}")
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _policy(stack: Stack, edge: openai.OpenAI) -> str:
    raw = edge.chat.completions.with_raw_response.create(**CHAT)
    url = f"{stack.edge_url}/v1/decisions/{raw.headers['x-request-id']}"
    policy: str = httpx.get(url, timeout=60).json()["policy"]
    return policy


def test_set_applies_and_a_broken_one_is_refused_and_reported(stack: Stack, edge: openai.OpenAI) -> None:
    try:
        done = _fleet(stack, "set", DEVICE, "router.policy=local-first")
        assert done.returncode == 0, done.stdout + done.stderr
        assert _policy(stack, edge) == "local-first"

        refused = _fleet(stack, "set", DEVICE, "router.policy=telepathy")
        assert refused.returncode == 1, refused.stdout + refused.stderr
        assert "telepathy" in refused.stdout + refused.stderr
        assert _policy(stack, edge) == "local-first"

        seen = json.loads(_fleet(stack, "get", DEVICE, "--json").stdout)
        assert seen["reported"]["state"] == "refused"
        assert "telepathy" in json.dumps(seen["reported"])
    finally:
        done = _fleet(stack, "set", DEVICE, "--replace", "router.policy=slo-utility")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _policy(stack, edge) == "slo-utility"
