"""The Language Model Evaluation Harness with two short tasks of our own: choices by log-likelihood, and generation."""

from __future__ import annotations

import json
import os
from typing import Any

from checking import Checks, Server, finished

checks = Checks(("lm_eval", "transformers"))
CAPITALS = [("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Egypt", "Cairo")]
CHOICES_YAML = """\
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""
GENERATE_YAML = """\
task: capitals_said
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def evaluate(server: Server, model: str, task: str, *options: str, batch: int = 1) -> list[dict[str, Any]]:
    """Run one task, and return its samples with what was answered.

    Args:
        options: further arguments of the model.
    """
    home = server.folder / "lm-eval"
    home.mkdir(exist_ok=True)
    names = [city for _, city in CAPITALS]
    rows = [{"country": country, "choices": names, "answer": place} for place, (country, _) in enumerate(CAPITALS)]
    data = home / "capitals.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (home / "capitals.yaml").write_text(CHOICES_YAML.format(data=data))
    (home / "said.yaml").write_text(GENERATE_YAML.format(data=data))
    path = "/v1/chat/completions" if "chat" in model else "/v1/completions"
    told = [f"model={server.model}", f"base_url={server.url}{path}", "num_concurrent=2", "max_retries=1", *options]
    out = home / f"{model}-{task}"
    argv = ["lm_eval", "run", "--model", model, "--model_args", ",".join(told), "--tasks", task]
    argv += ["--include_path", str(home), "--output_path", str(out), "--log_samples"]
    argv += ["--batch_size", str(batch)]
    argv += ["--apply_chat_template"] if "chat" in model else []
    env = {**os.environ, "OPENAI_API_KEY": server.key, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(home / "cache")}
    finished(argv, env=env)
    found = sorted(out.rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime)
    assert found, "no samples were written"
    return [json.loads(line) for line in found[-1].read_text().splitlines()]


@checks.that("local-completions: choices by log-likelihood (token ids, echo, logprobs)")
def choices(server: Server) -> None:
    told = evaluate(
        server, "local-completions", "capitals", f"tokenizer={server.tokenizer}", "tokenizer_backend=huggingface"
    )
    right = sum(sample["acc"] for sample in told)
    assert right >= 3, f"{right} of 4 capitals: {[sample['filtered_resps'] for sample in told['samples']]}"


@checks.that("local-completions: in batches of 4")
def batches(server: Server) -> None:
    told = evaluate(
        server,
        "local-completions",
        "capitals",
        f"tokenizer={server.tokenizer}",
        "tokenizer_backend=huggingface",
        batch=4,
    )
    assert sum(sample["acc"] for sample in told) >= 3


@checks.that("local-completions: with the server's own tokenizer (tokenizer_backend=remote)")
def remote(server: Server) -> None:
    told = evaluate(server, "local-completions", "capitals", "tokenizer_backend=remote", f"auth_token={server.key}")
    assert sum(sample["acc"] for sample in told) >= 3


@checks.that("local-completions: generate_until")
def generate(server: Server) -> None:
    told = evaluate(
        server, "local-completions", "capitals_said", f"tokenizer={server.tokenizer}", "tokenizer_backend=huggingface"
    )
    said = [sample["filtered_resps"][0] for sample in told]
    assert "Paris" in said[0], said


@checks.that("local-chat-completions: generate_until")
def chat(server: Server) -> None:
    told = evaluate(server, "local-chat-completions", "capitals_said")
    assert all(sample["filtered_resps"][0] for sample in told)


checks.run()
