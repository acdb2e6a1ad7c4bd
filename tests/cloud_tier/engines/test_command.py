"""What `vllm serve` is started with."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_tier.engines.command import ServerSpec, check_executable, command_of, environment_of, share_cores, window_of
from cloud_tier.engines.settings import CloudBackend, VllmSettings
from router.base.errors import ConfigError

KEY = "k" * 48


def spec(gpus: tuple[str, ...] = (), role: Any = "", connector: Any = "nixl", **changes: Any) -> ServerSpec:
    settings = VllmSettings(**{"model": "org/tiny-7b", "executable": "/opt/vllm/bin/vllm", **changes})
    backend = CloudBackend(name="big", kind="vllm", vllm=settings, role=role, kv_connector=connector)
    return ServerSpec(backend, settings, gpus)


def environment(of: ServerSpec, **environ: str) -> dict[str, str]:
    return environment_of(of, KEY, 5601, environ)


def test_one_rank_needs_no_more_than_model_and_address() -> None:
    assert command_of(spec(), 8123) == [
        *("/opt/vllm/bin/vllm", "serve", "org/tiny-7b", "--host", "127.0.0.1", "--port", "8123"),
        *("--served-model-name", "tiny-7b"),
    ]


def test_degrees_executor_and_further_flags_follow() -> None:
    many = spec(tensor_parallel=4, pipeline_parallel=2, data_parallel=3, executor="ray", args=("--max-model-len", "9"))
    assert command_of(many, 1)[9:] == [
        *("--tensor-parallel-size", "4", "--pipeline-parallel-size", "2", "--data-parallel-size", "3"),
        *("--distributed-executor-backend", "ray", "--max-model-len", "9"),
    ]


def test_speculation_is_a_flag_like_any_other() -> None:
    ngram = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2}'
    assert command_of(spec(args=("--speculative-config", ngram)), 1)[-2:] == ["--speculative-config", ngram]


def test_a_directory_is_given_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command_of(spec(model="~/tiny"), 1)[2] == str(tmp_path / "tiny")


def test_the_key_goes_by_the_environment_and_never_by_the_command_line() -> None:
    assert environment(spec())["VLLM_API_KEY"] == KEY
    assert KEY not in " ".join(command_of(spec(), 1))


def test_gpus_are_shown_to_it() -> None:
    assert environment(spec(gpus=("2", "3"), tensor_parallel=2))["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in environment(spec())


@pytest.mark.parametrize(
    ("ranks", "cores", "bound"),
    [
        ([], [0, 1], []),
        ([1], [0, 1], [""]),  # alone, vLLM chooses
        ([2], [0, 1], ["0|1"]),
        ([2], [0, 1, 2, 3], ["0,2|1,3"]),
        ([1, 1], [4, 6], ["4", "6"]),
        ([1, 2], [0, 1, 2], ["0", "1|2"]),
        ([1, 1, 1], [0, 1], ["nobind", "nobind", "nobind"]),
    ],
)
def test_ranks_on_the_cpu_share_the_cores(ranks: list[int], cores: list[int], bound: list[str]) -> None:
    assert share_cores(ranks, cores) == bound


def test_what_is_configured_wins_over_what_is_inherited_and_chosen() -> None:
    shared = replace(spec(env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}), cpu_bind="0|1")
    found = environment(shared, PATH="/bin", HF_HOME="/a")
    assert (found["VLLM_CPU_OMP_THREADS_BIND"], found["PATH"], found["HF_HOME"]) == ("nobind", "/bin", "/a")
    chosen = replace(spec(), cpu_bind="0|1")
    assert environment(chosen)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert environment(chosen, VLLM_CPU_OMP_THREADS_BIND="0|2")["VLLM_CPU_OMP_THREADS_BIND"] == "0|2"


def transfer(of: ServerSpec) -> dict[str, Any]:
    command = command_of(of, 1)
    return json.loads(command[command.index("--kv-transfer-config") + 1])


def test_the_halves_of_a_pair_get_their_connector() -> None:
    prefill, decode = spec(role="prefill"), spec(role="decode", gpus=("0",))
    assert transfer(prefill) == {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cpu"}
    assert transfer(decode) == {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
    assert environment(prefill)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"
    assert environment(prefill)["UCX_TLS"] == "tcp,sm,self"
    assert "UCX_TLS" not in environment(decode)
    assert "--kv-transfer-config" not in command_of(spec(), 1)


def test_a_shared_folder_serves_both_alike() -> None:
    found = [transfer(spec(role=role, connector="shared-folder", kv_folder="/kv")) for role in ("prefill", "decode")]
    assert found[0] == found[1]
    assert found[0]["kv_connector_extra_config"] == {"shared_storage_path": "/kv"}


def test_the_window_is_the_flags_then_the_models_own(tmp_path: Path) -> None:
    assert window_of(VllmSettings(model=str(tmp_path))) is None
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8192}')
    assert window_of(VllmSettings(model=str(tmp_path))) == 8192
    for args in (("--max-model-len", "2048"), ("--max_model_len=2048",)):
        assert window_of(VllmSettings(model=str(tmp_path), args=args)) == 2048
    assert window_of(VllmSettings(model=str(tmp_path), args=("--max-model-len", "auto"))) == 8192
    (tmp_path / "config.json").write_text('{"max_position_embeddings": "many"}')
    assert window_of(VllmSettings(model=str(tmp_path), args=("--max-model-len",))) is None


def test_a_program_that_is_not_there_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"backends\.big\.vllm\.executable = '/opt/vllm/bin/vllm': no such program"):
        check_executable("big", spec().settings)
    check_executable("big", spec(executable=sys.executable).settings)


def test_without_vllm_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_tier.engines.command.is_installed", lambda: False)
    with pytest.raises(ConfigError, match=r"vLLM is not installed here; run: pip install .*\[vllm\]"):
        check_executable("big", spec(executable="").settings)
