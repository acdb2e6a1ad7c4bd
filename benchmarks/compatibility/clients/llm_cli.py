"""The command `llm`, with a model of `extra-openai-models.yaml`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from checking import Checks, Server, finished

checks = Checks(("llm", "openai"))
YAML = """\
- model_id: ours
  model_name: {model}
  api_base: {url}
  api_key_name: ours
  supports_schema: true
  supports_tools: true
"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def llm(server: Server, *arguments: str) -> str:
    home = Path(server.folder) / "llm"
    home.mkdir(exist_ok=True)
    (home / "extra-openai-models.yaml").write_text(YAML.format(model=server.model, url=server.openai_url))
    (home / "keys.json").write_text(json.dumps({"ours": server.key}))
    env = {**os.environ, "LLM_USER_PATH": str(home)}
    return finished(["llm", *arguments], env=env, stdin=subprocess.DEVNULL)


@checks.that("a prompt, streamed to the terminal")
def prompt(server: Server) -> None:
    assert llm(server, "-m", "ours", "Say hello.", "-o", "max_tokens", "12", "-o", "temperature", "0").strip()


@checks.that("a prompt, --no-stream, with a system prompt; the log has its tokens")
def whole(server: Server) -> None:
    assert llm(server, "-m", "ours", "--no-stream", "-s", "Be brief.", "Say hello.", "-o", "max_tokens", "12").strip()
    last = json.loads(llm(server, "logs", "-n", "1", "--json"))[0]
    assert last["output_tokens"] > 0


@checks.that("a conversation goes on (-c)")
def conversation(server: Server) -> None:
    llm(server, "-m", "ours", "My name is Ada.", "-o", "max_tokens", "8")
    assert llm(server, "-c", "What is my name?", "-o", "max_tokens", "8").strip()


@checks.that("--schema")
def schema(server: Server) -> None:
    told = llm(server, "-m", "ours", "--schema", json.dumps(SCHEMA), "A city.", "-o", "max_tokens", "60")
    assert json.loads(told)["city"] in {"Paris", "Rome"}


checks.run()
