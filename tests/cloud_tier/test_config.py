from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cloud_tier import lineup
from cloud_tier.config import (
    AuthConfig,
    CloudConfig,
    ModelConfig,
    ServerConfig,
    key_sources,
    load,
    replace_models,
    require_keys,
)
from cloud_tier.engines.settings import CloudBackend, VllmSettings
from cloud_tier.gpus import GPU_WORKING_BYTES, Gpu, Wanted, assign_gpus, find_gpus, spare_bytes
from cloud_tier.lineup import line_up
from models.catalogue.families import load_catalogue
from models.formats.weights import open_weights
from models.store.store import ModelStore
from router.base.config import Flag
from router.base.errors import ArtifactError, ConfigError, ModelNotFound
from router.base.loopback import is_loopback
from router.tenants.tenancy import KeySources
from router.upstream.settings import BackendModel
from tests.support.fake_engine import toy_model_directory
from tests.support.paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "cloud.toml"
KEY = "k" * 32
GPU = Gpu("0", "a GPU", 80 << 30)


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cloud.toml"
    path.write_text(text)
    return path


def _keys_of(shape: type, prefix: str = "") -> set[str]:
    keys = set()
    for field in msgspec.structs.fields(shape):
        keys.add(f"{prefix}{field.name}")
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys |= _keys_of(field.type, f"{prefix}{field.name}.")
    return keys


def test_the_example_loads_and_shows_the_defaults() -> None:
    config = load(EXAMPLE, environ={})
    assert [(model.variant, model.tensor_parallel) for model in config.models] == [
        ("smollm2-135m-fp32", 2),
        ("smollm2-135m-pruned-fp32", 1),
    ]
    assert msgspec.structs.replace(config, models=()) == CloudConfig()
    assert config.models[1] == ModelConfig(variant="smollm2-135m-pruned-fp32")


def test_the_example_documents_every_key() -> None:
    text = EXAMPLE.read_text()
    wanted = {key.rpartition(".")[2] for key in _keys_of(CloudConfig) | _keys_of(ModelConfig)}
    wanted |= (
        {key.rpartition(".")[2] for key in _keys_of(CloudBackend)} | _keys_of(VllmSettings) | _keys_of(BackendModel)
    )
    tables = set(re.findall(r"^#? ?\[+([a-z.]+)\]+", text, re.MULTILINE))
    written = set(re.findall(r"(?:^(?:# )?|[{,] )([a-z_]+) = ", text, re.MULTILINE))  # in tables of one line too
    assert wanted - written - {name.rpartition(".")[2] for name in tables} == set()


def test_no_file_means_the_defaults_under_environment_and_flags() -> None:
    environ = {"OVERSPILL_CLOUD__SERVER__PORT": "8701", "OVERSPILL_CLOUD__SERVER__DRAIN_S": "5"}
    config = load(
        None, flags={"server.host": Flag("--host", None), "server.port": Flag("--port", 8702)}, environ=environ
    )
    assert config.server == ServerConfig(port=8702, drain_s=5.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nprot = 1", r"cloud.toml:2: unknown key `server.prot`; did you mean `port`"),
        ("[server]\nport = '8700'", r"cloud.toml:2: `server.port`"),
        ("[server]\ndrain_s = -1", r"cloud.toml:2: `server.drain_s`"),
        ("[[models]]\nvariant = 'a'\ntensor_parallel = 0", r"tensor_parallel"),
        ("[[models]]\nvariant = 'a'\ndevice = 'tpu'", r"device"),
        ("[[models]]\ntensor_parallel = 2", r"either `variant` or `path`"),
        ("[[models]]\nvariant = 'a'\npath = '/b'", r"both"),
        ("[[models]]\nvariant = 'a'\nname = 'b'", r"go with `path`"),
        ("[[models]]\npath = '/models/my model'", r"`name` = 'my model'"),
        ("[router]\npolicy = 'magic'", r"router.policy.*'magic'"),
        ("[limits]\nmax_requests = 0", r"limits.max_requests"),
        ("[auth]\nkeys = ['x']", r"unknown key `auth.keys`"),
        ("models = 3", r"models"),
        ("[server", r"not valid TOML"),
    ],
)
def test_a_wrong_file_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(_written(tmp_path, text), environ={})


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read /nowhere/cloud.toml"):
        load(Path("/nowhere/cloud.toml"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    require_keys(ServerConfig(host=host), AuthConfig(), KeySources())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org"])  # noqa: S104
def test_everything_else_needs_one_and_names_the_remedy(host: str) -> None:
    with pytest.raises(ConfigError, match=r"OVERSPILL_CLOUD_API_KEYS=\$\(openssl"):
        require_keys(ServerConfig(host=host), AuthConfig(), KeySources())
    require_keys(ServerConfig(host=host), AuthConfig(), KeySources.of({KEY: None}))


def _ceilings(sources: KeySources) -> dict[int, int]:
    """The highest priority of each of `KEY1`, `KEY2`, … that is known."""
    found = ((number, sources.directory().by_key(f"{KEY}{number}".encode())) for number in range(1, 9))
    return {number: caller.max_priority for number, caller in found if caller is not None}


def test_keys_come_from_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# two keys\n{KEY}1\n\n{KEY}2  # the second\n")
    sources = key_sources(AuthConfig(keys_file=str(path)), {"OVERSPILL_CLOUD_API_KEYS": f"{KEY}3, {KEY}4"})
    assert _ceilings(sources) == dict.fromkeys(range(1, 5), 0)
    assert key_sources(AuthConfig(keys_env="OTHER"), {"OVERSPILL_CLOUD_API_KEYS": KEY}).directory().open


def test_a_key_may_have_a_ceiling_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}1 priority=5  # an edge\n{KEY}2\n{KEY}3\tpriority=-1\n")
    auth = AuthConfig(keys_file=str(path), max_priority=1)
    found = key_sources(auth, {"OVERSPILL_CLOUD_API_KEYS": f"{KEY}4 priority=3, {KEY}5,{KEY}1 priority=9"})
    assert _ceilings(found) == {1: 5, 2: 1, 3: -1, 4: 3, 5: 1}


@pytest.mark.parametrize("line", [f"{KEY} priority=high", "priority=5", f"{KEY} priority=99999999999", f"{KEY} prio=5"])
def test_a_ceiling_that_is_none_is_refused_without_showing_the_key(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(line)
    with pytest.raises(ConfigError, match=rf"{path}:1: ") as raised:
        key_sources(AuthConfig(keys_file=str(path)), {}).directory()
    assert KEY not in raised.value.message


def test_a_key_that_is_none_is_refused_without_being_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{KEY}\nhunter2\n")
    with pytest.raises(ConfigError, match=rf"{path}:2: .* at least 16") as raised:
        key_sources(AuthConfig(keys_file=str(path)), {}).directory()
    assert "hunter2" not in raised.value.message
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not UTF-8"):
        key_sources(AuthConfig(keys_file=str(path)), {}).directory()
    with pytest.raises(ConfigError, match="No such file"):
        key_sources(AuthConfig(keys_file=str(tmp_path / "none")), {}).directory()


def test_model_flags_replace_the_list_but_keep_what_the_file_says_about_a_model() -> None:
    config = load(EXAMPLE, environ={})
    chosen = replace_models(config, ["smollm2-135m-fp32", "other"], {"device": "cpu", "dtype": None})
    assert [(m.variant, m.tensor_parallel, m.device) for m in chosen.models] == [
        ("smollm2-135m-fp32", 2, "cpu"),
        ("other", 1, "cpu"),
    ]
    assert replace_models(config, [], {}) == config


def test_a_wrong_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^--device: .* = 'tpu': expected one of 'auto', 'cpu', 'cuda'"):
        replace_models(CloudConfig(), ["a"], {"device": "tpu"})


# --- the line-up -----------------------------------------------------------------------------------------------------


def _line_up(tmp_path: Path, *entries: ModelConfig):
    catalogue = load_catalogue()
    return line_up(entries, catalogue, ModelStore(tmp_path / "store", catalogue), lambda **_: ())


def test_a_directory_is_served_under_its_name(tmp_path: Path) -> None:
    folder = toy_model_directory(tmp_path / "Toy-Model")
    (place,) = _line_up(tmp_path, ModelConfig(path=str(folder), dtype="float32"))
    assert (place.info.variant, place.info.family, place.info.rung) == ("Toy-Model", "Toy-Model", 0)
    assert place.info.context_tokens == 512
    assert (place.engine.weights, place.engine.dtype, place.engine.device) == (str(folder), "float32", "cpu")
    assert place.info.prior.source.startswith("estimated from")
    assert place.prompts().template is not None
    assert place.info.holds_up
    assert place.info.leaves_steps


def test_directories_can_make_a_ladder_and_one_model_several_engines(tmp_path: Path) -> None:
    big = str(toy_model_directory(tmp_path / "big"))
    small = str(toy_model_directory(tmp_path / "small"))
    places = _line_up(
        tmp_path,
        ModelConfig(path=big, family="toy", max_context_tokens=128),
        ModelConfig(path=big, family="toy"),
        ModelConfig(path=small, family="toy", rung=1, quality=0.5),
    )
    assert [p.info.replica_id for p in places] == ["engine/big", "engine/big#2", "engine/small"]
    assert len({p.info.endpoint for p in places}) == 3, "engines fail one by one"
    assert [(p.info.family, p.info.rung) for p in places] == [("toy", 0), ("toy", 0), ("toy", 1)]
    assert places[0].info.context_tokens == 128


@pytest.mark.parametrize(
    ("entries", "error", "named"),
    [
        ([{"variant": "smollm3"}], ModelNotFound, "smollm2-135m-fp32.*Hugging Face directory"),
        ([{"variant": "smollm2-135m-int8"}], ConfigError, "ONNX artifact .* smollm2-135m-fp32"),
        ([{"variant": "smollm2-135m"}], ArtifactError, "overspill models pull smollm2-135m"),
        ([{"path": "DIR", "tensor_parallel": 3}], ConfigError, "the model has 2 KV heads"),
        ([{"path": "DIR"}, {"path": "OTHER", "name": "dir"}], ConfigError, "two different models are called `dir`"),
        ([{"path": "DIR", "family": "f"}, {"path": "OTHER", "family": "dir"}], ConfigError, "another model's family"),
        ([{"path": "/nowhere/model"}], ArtifactError, "/nowhere/model"),
    ],
)
def test_a_line_up_that_cannot_be_says_why(tmp_path: Path, entries, error: type[Exception], named: str) -> None:
    found = {"DIR": str(toy_model_directory(tmp_path / "dir")), "OTHER": str(toy_model_directory(tmp_path / "other"))}
    models = [ModelConfig(**{k: found.get(v, v) if k == "path" else v for k, v in e.items()}) for e in entries]
    with pytest.raises(error, match=named):
        _line_up(tmp_path, *models)


@pytest.mark.parametrize(("multiplies", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_automatic_device_is_asked_for_once_and_sets_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, multiplies: bool, dtype: str
) -> None:
    monkeypatch.setattr(lineup, "computes_bfloat16", lambda: multiplies)
    folder = str(toy_model_directory(tmp_path / "toy"))
    asked = []

    def gpus(*, expected: bool) -> tuple[Gpu, ...]:
        asked.append(expected)
        return (GPU,)

    catalogue = load_catalogue()
    entries = [ModelConfig(path=folder), ModelConfig(path=folder), ModelConfig(path=folder, device="cpu")]
    places = line_up(entries, catalogue, ModelStore(tmp_path, catalogue), gpus)
    assert [(p.engine.device, p.engine.dtype) for p in places] == [
        ("cuda", "bfloat16"),
        ("cuda", "bfloat16"),
        ("cpu", dtype),
    ]
    assert asked == [False]


def test_threads_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(toy_model_directory(tmp_path / "toy"))
    entries = [
        ModelConfig(path=folder, tensor_parallel=2),
        ModelConfig(path=folder),
        ModelConfig(path=folder, threads=5),
    ]
    shares = ((1, (1,), (1,)), (2, (1,), (1,)), (13, (3,), (1, 2, 3)), (999, (16,), (1, 2, 4, 8, 16)))
    for cores, of_ranks, alone in shares:
        monkeypatch.setattr(lineup, "usable_cores", lambda cores=cores: cores)
        assert [place.engine.threads for place in _line_up(tmp_path, *entries)] == [of_ranks, alone, (5,)]


def test_an_engine_alone_may_find_out_how_many_cores_are_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ModelConfig(path=str(toy_model_directory(tmp_path / "toy")))
    for cores, threads in ((1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 5, 6)), (8, (1, 2, 4, 7, 8))):
        monkeypatch.setattr(lineup, "usable_cores", lambda cores=cores: cores)
        (alone,) = _line_up(tmp_path, entry)
        assert alone.engine.threads == threads


def test_a_cache_that_nobody_sized_fits_the_memory_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(toy_model_directory(tmp_path / "toy"))
    sizes = []
    for left in (2**50, 2**20, 0):
        monkeypatch.setattr(lineup, "usable_memory_bytes", lambda left=left: left)
        (place,) = _line_up(tmp_path, ModelConfig(path=folder, device="cpu", dtype="float32"))
        sizes.append(place.engine.kv_cache_tokens)
    assert sizes[0] == 32 * 2048
    assert sizes[0] >= sizes[1] >= sizes[2] == 4096
    (given,) = _line_up(tmp_path, ModelConfig(path=folder, kv_cache_tokens=640, max_running=7))
    assert (given.engine.kv_cache_tokens, given.engine.max_running) == (640, 7)


@pytest.mark.process
def test_the_gpus_of_this_machine_are_those_of_torch() -> None:
    assert len(find_gpus(expected=True)) == torch.cuda.device_count()
    assert len(find_gpus(expected=False)) in {0, torch.cuda.device_count()}


@pytest.mark.parametrize(
    ("entry", "gpus", "named"),
    [
        ({"tensor_parallel": 2}, 1, "torch finds 1 here; use at most 1, or device = 'cpu'"),
        ({"device": "cuda"}, 0, "torch finds 0 here; set device = 'cpu', or install its driver"),
    ],
)
def test_fewer_gpus_than_ranks_are_found_out_before_an_engine_starts(
    tmp_path: Path, entry: dict[str, Any], gpus: int, named: str
) -> None:
    folder, catalogue = str(toy_model_directory(tmp_path / "toy")), load_catalogue()
    with pytest.raises(ConfigError, match=named):
        line_up(
            [ModelConfig(path=folder, **entry)], catalogue, ModelStore(tmp_path, catalogue), lambda **_: (GPU,) * gpus
        )


def test_gpus_by_name_are_left_to_the_ranks(tmp_path: Path) -> None:
    folder, catalogue = str(toy_model_directory(tmp_path / "toy")), load_catalogue()
    entry = ModelConfig(path=folder, device="cuda", tensor_parallel=2, gpus=("2", "3"))
    (place,) = line_up([entry], catalogue, ModelStore(tmp_path, catalogue), lambda **_: (GPU,))
    assert (place.engine.device, place.engine.gpus) == ("cuda", ("2", "3"))


def test_every_rank_needs_a_gpu_of_its_own() -> None:
    with pytest.raises(ValueError, match="one for each rank"):
        ModelConfig(variant="smollm2-135m-fp32", tensor_parallel=2, gpus=("0",))


# --- which engine gets which GPU -------------------------------------------------------------------------------------

GIB = 1 << 30


def _gpus(*free_gib: float) -> list[Gpu]:
    return [Gpu(str(number), "a GPU", int(gib * GIB)) for number, gib in enumerate(free_gib)]


def test_two_models_on_two_gpus_do_not_share_the_first(tmp_path: Path) -> None:
    folder, catalogue = str(toy_model_directory(tmp_path / "toy")), load_catalogue()
    entries = [ModelConfig(path=folder), ModelConfig(path=folder)]
    places = line_up(entries, catalogue, ModelStore(tmp_path, catalogue), lambda **_: tuple(_gpus(40, 40)))
    assert [place.engine.gpus for place in places] == [("0",), ("1",)]


def test_a_cache_that_nobody_sized_takes_what_is_left_of_the_gpu(tmp_path: Path) -> None:
    folder, catalogue = str(toy_model_directory(tmp_path / "toy")), load_catalogue()
    store = ModelStore(tmp_path, catalogue)

    def tokens(free_gib: float, *entries: ModelConfig) -> list[int]:
        places = line_up(entries, catalogue, store, lambda **_: tuple(_gpus(free_gib)))
        return [place.engine.kv_cache_tokens for place in places]

    auto, sized = ModelConfig(path=folder, max_running=4096), ModelConfig(path=folder, kv_cache_tokens=4096)
    (alone,) = tokens(1.05, auto)
    assert alone > 16_384
    shared = tokens(2.05, auto, sized)
    assert shared[1] == 4096
    assert 16_384 < shared[0] < alone  # half of what is left beside both
    assert tokens(80, ModelConfig(path=folder)) == [16 * 1024]
    assert tokens(80, auto) == [4096 * 512]  # all their windows


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [
        ((24, 80), [(1, 10), (1, 60)], [("0",), ("1",)]),  # the large one where it fits, whatever the order
        ((24, 80), [(1, 10)], [("1",)]),  # most free memory first
        ((80, 80, 80), [(2, 40), (1, 40)], [("0", "1"), ("2",)]),
        ((80, 80), [(2, 40), (2, 30)], [("0", "1"), ("0", "1")]),  # no GPU is left: they share what has room
        ((80,), [(1, 20), (1, 20), (0, 0)], [("0",), ("0",), ()]),
        ((40, 40), [(1, 10), (1, 10, "0")], [("1",), ("0",)]),  # a named GPU is set aside first
        ((40,), [(2, 10, "GPU-8", "GPU-9")], [("GPU-8", "GPU-9")]),  # what torch does not list is left to the ranks
    ],
)
def test_engines_get_gpus_of_their_own_by_free_memory(
    free: tuple[int, ...], wanted: list[tuple[Any, ...]], expected: list[tuple[str, ...]]
) -> None:
    asked = [Wanted(f"model {n}", ranks, gib * GIB, tuple(names)) for n, (ranks, gib, *names) in enumerate(wanted)]
    assert assign_gpus(asked, _gpus(*free)) == expected


def test_what_is_left_of_gpus_is_shared_by_the_engines_there() -> None:
    asked = [Wanted("a", 2, 10 * GIB), Wanted("b", 1, 20 * GIB), Wanted("c", 0, 0), Wanted("d", 1, GIB, ("GPU-9",))]
    placed = [("0", "1"), ("1",), (), ("GPU-9",)]
    assert spare_bytes(asked, placed, _gpus(80, 40)) == [5 * GIB, 5 * GIB, 0, 0]


@pytest.mark.parametrize(
    ("free", "wanted"),
    [
        ((24, 24), [(1, 30)]),
        ((80, 24), [(2, 30)]),
        ((40,), [(1, 30), (1, 30)]),
        ((40,), [(1, 30, "0"), (1, 30, "0")]),
    ],
)
def test_what_fits_no_gpu_is_refused_with_what_is_free(free: tuple[int, ...], wanted: list[tuple[Any, ...]]) -> None:
    asked = [Wanted(f"model {n}", ranks, gib * GIB, tuple(names)) for n, (ranks, gib, *names) in enumerate(wanted)]
    with pytest.raises(ConfigError, match=r"30\.0 GiB.*GPU 0 \(a GPU\).*kv_cache_tokens") as raised:
        assign_gpus(asked, _gpus(*free))
    assert raised.value.param == "models.gpus"


def test_a_model_larger_than_the_gpu_is_refused_before_an_engine_starts(tmp_path: Path) -> None:
    folder, catalogue = str(toy_model_directory(tmp_path / "toy")), load_catalogue()
    entry = ModelConfig(path=folder, device="cuda")
    with pytest.raises(ConfigError) as raised:
        line_up([entry], catalogue, ModelStore(tmp_path, catalogue), lambda **_: tuple(_gpus(0.5)))
    assert raised.value.param == "models.gpus"


def test_the_memory_an_engine_wants_is_its_weights_its_cache_and_room_to_work(tmp_path: Path) -> None:
    folder, catalogue = toy_model_directory(tmp_path / "toy"), load_catalogue()
    entry = ModelConfig(path=str(folder), device="cuda", kv_cache_tokens=16_384)
    (place,) = line_up([entry], catalogue, ModelStore(tmp_path, catalogue), lambda **_: (GPU,))
    model = open_weights(folder).config
    cache_bytes = 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim * 16_384
    in_file_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))  # float32, a little header
    estimate = lineup._wanted(place, entry).bytes_a_rank - GPU_WORKING_BYTES - cache_bytes
    assert estimate == pytest.approx(in_file_bytes / 2, rel=0.1)


def test_gpus_hidden_from_this_process_stay_hidden_from_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    told = subprocess.CompletedProcess([], 0, stdout='[["a GPU", 5], ["a GPU", 6]]')
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: told)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7f")
    assert [gpu.id for gpu in find_gpus(expected=True)] == ["3", "GPU-7f"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [gpu.id for gpu in find_gpus(expected=True)] == ["0", "1"]
