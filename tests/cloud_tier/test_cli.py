from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fake_engine import toy_model_directory
from tests.support.paths import REPOSITORY


def _overspill(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "overspill", "cloud", *arguments],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.process
def test_check_says_what_would_be_served(tmp_path: Path) -> None:
    folder = toy_model_directory(tmp_path / "toy")
    key = "s3cret-s3cret-s3cret"
    done = _overspill(
        "check", "--model", str(folder), "--tp", "2", "--device", "cpu", "--dtype", "float32", "--host", "0.0.0.0",  # noqa: S104
        env={"OVERSPILL_CLOUD_API_KEYS": key},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "model    toy (family toy, rung 0): 2 ranks on cpu, float32, window 512 tokens" in done.stdout
    assert "1 API key" in done.stdout
    assert key not in done.stdout + done.stderr


@pytest.mark.process
@pytest.mark.real_model
def test_check_says_which_encoders_and_pipelines_would_be_served(tmp_path: Path, models_root: Path) -> None:
    config = tmp_path / "cloud.toml"
    config.write_text(
        """
[[models]]
variant = "all-minilm-l6-v2"

[[pipelines]]
name = "words"
[[pipelines.stages]]
name = "tokenize"
use = "tokenize"
options = { tokenizer = "all-minilm-l6-v2" }
"""
    )
    env = {"OVERSPILL_MODELS": str(models_root)}
    done = _overspill("check", "--config", str(config), env=env)
    assert done.returncode == 0, done.stderr
    assert "encoder  all-minilm-l6-v2-fp32 (family all-minilm-l6-v2, rung 0): window 256 tokens" in done.stdout
    assert "pipeline words (family words, rung 0): text" in done.stdout
    told = json.loads(_overspill("check", "--config", str(config), "--json", env=env).stdout)
    assert [one["variant"] for one in told["pipelines"]] == ["all-minilm-l6-v2-fp32", "words"]


@pytest.mark.process
def test_check_takes_every_option_of_serve(tmp_path: Path) -> None:
    folder = toy_model_directory(tmp_path / "toy")
    done = _overspill("check", "--model", str(folder), "--device", "cpu", "--engine", "torch")
    assert done.returncode == 0, done.stderr
    wrong = _overspill("check", "--model", str(folder), "--engine", "trt")
    assert wrong.returncode == 2
    assert "'trt'" in wrong.stderr


@pytest.mark.process
def test_what_no_engine_could_serve_is_not_proposed() -> None:
    done = _overspill("check", "--model", "nonsense")
    assert "smollm2-135m" in done.stderr
    assert "centerface" not in done.stderr


@pytest.mark.process
def test_check_prints_json(tmp_path: Path) -> None:
    folder = toy_model_directory(tmp_path / "toy")
    key = "s3cret-s3cret-s3cret"
    done = _overspill(
        "check", "--model", str(folder), "--device", "cpu", "--json", env={"OVERSPILL_CLOUD_API_KEYS": key}
    )
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert (tree["ok"], tree["api_keys"], tree["policy"]) == (True, 1, "slo-utility")
    (model,) = tree["models"]
    assert (model["variant"], model["context_tokens"], model["engine"]["tensor_parallel"]) == ("toy", 512, 1)
    assert key not in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--host", "0.0.0.0"], "is reachable from other machines, and no API key is set"),  # noqa: S104
        ([], "no model to serve: name one with --model"),
        (["--model", "smollm2-135m"], "overspill models pull smollm2-135m"),
        (["--model", "nonsense"], "no model `nonsense` in the catalogue"),
        (["--model", "nonsense", "--device", "tpu"], "tpu"),
        (["--config", "/nowhere.toml"], "cannot read /nowhere.toml"),
    ],
)
def test_what_cannot_be_served_ends_with_2_and_one_line(arguments: list[str], named: str) -> None:
    done = _overspill("serve", *arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
def test_help_is_there_and_names_every_flag() -> None:
    done = _overspill("serve", "--help", env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.returncode == 0
    for flag in ("--config", "--model", "--tensor-parallel", "--host", "--port", "--device", "--dtype"):
        assert flag in done.stdout


@pytest.mark.process
@pytest.mark.parametrize("command", ["serve", "check"])
def test_without_torch_the_extra_is_named_before_anything_starts(tmp_path: Path, command: str) -> None:
    folder = toy_model_directory(tmp_path / "toy")
    arguments = ["overspill", "cloud", command, "--model", str(folder), "--port", "0", "--device", "cpu"]
    code = (
        f"import subprocess, sys; sys.modules['torch'] = None; sys.argv = {arguments!r}; "
        "import overspill; overspill.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "needs the extra `cloud`: torch cannot be imported; run: pip install " in done.stderr
    assert done.stdout == ""


@pytest.mark.process
@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ('[jobs]\ndir = "{tmp}/cloud.toml"', "jobs.dir: cannot write"),
        ('[tenants]\ndatabase = "{tmp}/cloud.toml"', "tenants.database"),
        ("[server]\nport = 8700\n[grpc]\nenabled = true\nport = 8700", "grpc.port = 8700 is server.port too"),
    ],
)
def test_check_refuses_what_serve_would(tmp_path: Path, tables: str, named: str) -> None:
    config = tmp_path / "cloud.toml"
    config.write_text(tables.replace("{tmp}", str(tmp_path)))
    folder = toy_model_directory(tmp_path / "toy")
    done = _overspill("check", "--config", str(config), "--model", str(folder), "--device", "cpu")
    assert (done.returncode, named in done.stderr) == (2, True), done.stderr
    assert config.read_text() == tables.replace("{tmp}", str(tmp_path))
