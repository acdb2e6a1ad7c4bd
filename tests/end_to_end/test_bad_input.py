"""What a running edge agent answers to what it cannot serve; the codecs' own tests go through every field."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from examples.demo.processes import overspill
from examples.demo.stack import Stack

pytestmark = pytest.mark.real_model

CHAT: dict[str, Any] = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
WRONG = {
    "model": 7,
    "messages": "Hi",
    "max_tokens": "many",
    "max_completion_tokens": 1.5,
    "temperature": "hot",
    "top_p": [],
    "top_k": "all",
    "seed": "lucky",
    "stop": 3,
    "stream": "yes",
    "stream_options": True,
    "presence_penalty": "x",
    "frequency_penalty": {},
    "repetition_penalty": "x",
    "ignore_eos": "no",
    "n": "two",
}


@pytest.mark.parametrize("field", sorted(WRONG))
def test_a_field_of_the_wrong_type_is_named(stack: Stack, field: str) -> None:
    response = httpx.post(f"{stack.edge_url}/v1/chat/completions", json={**CHAT, field: WRONG[field]}, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    assert error["param"].startswith(field)
    assert field in error["message"]


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b'{"model": "smollm2-135m", }', b"\xff\xfe"])
def test_malformed_json_is_a_400(stack: Stack, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(f"{stack.edge_url}/v1/chat/completions", content=body, headers=headers, timeout=60)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_negative_max_tokens_names_the_field(edge: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        edge.chat.completions.create(**{**CHAT, "max_tokens": -1})
    assert caught.value.param == "max_tokens"


def test_unknown_model_names_the_known_ones(edge: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        edge.chat.completions.create(**{**CHAT, "model": "gpt-17"})
    assert caught.value.code == "model_not_found"
    assert "smollm2-135m-int8" in caught.value.message


def test_a_prompt_longer_than_every_window_names_the_largest(edge: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        edge.completions.create(model="smollm2-135m", prompt="word " * 9000, max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message


@pytest.mark.parametrize(("table", "key"), [("agent", "colour"), ("router", "ttft_slo_s"), ("upstream", "uri")])
def test_an_unknown_config_key_is_named_with_its_line(tmp_path: Path, table: str, key: str) -> None:
    config = tmp_path / "edge.toml"
    config.write_text(f"# a comment\n[{table}]\n{key} = 1\n")
    run = subprocess.run(
        overspill("edge", "check", "--config", str(config)), capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 2
    assert f"{config}:3" in run.stderr
    assert f"{table}.{key}" in run.stderr
