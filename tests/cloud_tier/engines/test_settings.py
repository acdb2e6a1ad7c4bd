"""`[[backends]]` of kind `vllm`: what is refused, and what the message says to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_tier.config import CloudConfig, load
from router.base.errors import ConfigError

GOOD = '[[backends]]\nname = "big"\nkind = "vllm"\n[backends.vllm]\nmodel = "org/Tiny-7B"\n'


def loaded(tmp_path: Path, text: str) -> CloudConfig:
    path = tmp_path / "cloud.toml"
    path.write_text(text)
    return load(path, environ={})


def test_a_model_is_enough(tmp_path: Path) -> None:
    (backend,) = loaded(tmp_path, GOOD).backends
    assert backend.vllm is not None
    assert (backend.vllm.served_name, backend.vllm.ranks, backend.vllm.directory) == ("Tiny-7B", 1, None)


def test_ranks_are_the_product_of_the_three(tmp_path: Path) -> None:
    (backend,) = loaded(tmp_path, GOOD + "tensor_parallel = 4\npipeline_parallel = 2\ndata_parallel = 3\n").backends
    assert backend.vllm is not None
    assert backend.vllm.ranks == 24


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--port", "`port`"),
        ("--port=9000", "`port`"),
        ("--tensor-parallel-size", "`tensor_parallel`"),
        ("--tensor_parallel_size=2", "`tensor_parallel`"),
        ("--tensor-par", "`tensor_parallel`"),
        ("-tp", "`tensor_parallel`"),
        ("-pp", "`pipeline_parallel`"),
        ("--data-parallel-size", "`data_parallel`"),
        ("--distributed-executor-backend", "`executor`"),
        ("--served-model-name", "`served`"),
        ("--model", "`model`"),
        ("--api-key", "leave it out"),
        ("--host", "leave it out"),
        ("--uds", "leave it out"),
        ("--headless", "leave it out"),
    ],
)
def test_a_flag_that_the_tier_sets_is_refused_with_the_key_to_use(tmp_path: Path, flag: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, f'{GOOD}args = ["--enforce-eager", "{flag}", "2"]\n')
    assert f"`args` holds {flag}, which the tier sets itself" in caught.value.message
    assert remedy in caught.value.message
    assert "backends" in caught.value.message


@pytest.mark.parametrize(
    "flag", ["--max-model-len", "--enforce-eager", "--speculative-config", "--data-parallel-backend", "--dtype", "-O3"]
)
def test_any_other_flag_is_passed_through(tmp_path: Path, flag: str) -> None:
    (backend,) = loaded(tmp_path, f'{GOOD}args = ["{flag}"]\n').backends
    assert backend.vllm is not None
    assert backend.vllm.args == (flag,)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("[backends.vllm]\nmodel", "#"), "wants a table [backends.vllm] with `model`"),
        (GOOD.replace('kind = "vllm"', 'kind = "vllm"\nurls = ["http://a:1"]'), "`urls` goes with servers that run"),
        (GOOD.replace('kind = "vllm"', 'kind = "vllm"\napi_key = "env:KEY"'), "`api_key` goes with servers that run"),
        (GOOD.replace('kind = "vllm"', 'urls = ["http://a:1"]'), '`vllm` goes with kind = "vllm", here it is "openai"'),
        (GOOD + 'gpus = ["0"]\ntensor_parallel = 2\n', "`gpus` names 1 for 2 ranks"),
        (GOOD + 'gpus = ["0"]\nexecutor = "ray"\n', "the cluster assigns them"),
        (GOOD + 'env = { VLLM_API_KEY = "x" }\n', "`env` sets VLLM_API_KEY"),
        (GOOD + 'env = { CUDA_VISIBLE_DEVICES = "0" }\n', "use the key `gpus`"),
        (GOOD.replace('org/Tiny-7B"', '"'), "model"),
        (GOOD + "tensor_parallel = 0\n", "tensor_parallel"),
        (GOOD.replace('"vllm"\n', '"vllm"\nrole = "decode"\n'), 'a second entry of this name with role = "prefill"'),
        (GOOD + GOOD, "two are called big"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, text)
    assert says in caught.value.message


def halves(prefill: str = "", decode: str = "") -> str:
    one = '[[backends]]\nname = "big"\nkind = "vllm"\nrole = "{}"\n{}\n[backends.vllm]\nmodel = "m"\n'
    return one.format("prefill", prefill) + one.format("decode", decode)


def test_two_halves_of_one_name_are_one_backend(tmp_path: Path) -> None:
    assert [backend.role for backend in loaded(tmp_path, halves()).backends] == ["prefill", "decode"]


def test_halves_take_no_connector_of_the_operators(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use the key `kv_connector`"):
        loaded(tmp_path, halves() + "args = ['--kv-transfer-config', '{}']\n")


def test_a_shared_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wants `kv_folder`"):
        loaded(tmp_path, halves(decode='kv_connector = "shared-folder"'))


def test_a_role_is_for_vllm_servers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`role` is for vLLM servers, not for kind `overspill`"):
        loaded(tmp_path, '[[backends]]\nname = "a"\nkind = "overspill"\nurls = ["http://a:1"]\nrole = "decode"\n')
