"""The catalogue: strict files, a ladder that holds together, names that lead somewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from models.catalogue.families import BUILT_IN, Catalogue, Source, load_catalogue
from router.base.errors import ArtifactError, ConfigError, ModelNotFound
from tests.support.toy_family import TOY


def write(folder: Path, text: str, name: str = "toy.toml") -> Path:
    (folder / name).write_text(text)
    return folder


def test_built_in_families_are_sound() -> None:
    catalogue = load_catalogue()
    assert len(catalogue) == len(list(BUILT_IN.glob("*.toml")))
    for family in catalogue:
        qualities = [variant.quality for variant in family.variants]
        assert qualities == sorted(qualities, reverse=True), "a lower rung cannot be better"
        assert family.variants[0].quality == 1.0
        first = family.sources[0]
        assert all(first.files.values()) if first.files else first.sha256, "the preferred source is pinned"
        for variant in family.variants:
            assert variant.name.startswith(family.name)
            assert variant.precision == "fp32" or variant.budget or variant.min_cosine
            assert catalogue.variant(variant.name) == variant
            assert catalogue.family_of(variant.name) == family


def test_smollm2_has_the_promised_rungs() -> None:
    family = load_catalogue().family("smollm2-135m")
    assert [variant.name for variant in family.variants] == [
        "smollm2-135m-fp32",
        "smollm2-135m-int8",
        "smollm2-135m-pruned-fp32",
        "smollm2-135m-pruned-int8",
    ]
    assert [variant.format for variant in family.variants] == ["weights", "onnx", "weights", "onnx"]
    pruned, quantized = family.variants[2:]
    assert pruned.layers is not None
    assert pruned.layers == quantized.layers
    assert len(pruned.layers) < 30


def test_families_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = load_catalogue(write(tmp_path, TOY))
    assert [family.name for family in catalogue] == ["all-minilm-l6-v2", "centerface", "smollm2-135m", "toy"]
    variant = catalogue.variant("toy-int8")
    assert (variant.family, variant.layers, variant.budget) == ("toy", (0, 2), None)
    monkeypatch.setenv("OVERSPILL_CATALOGUE", str(tmp_path))
    assert load_catalogue().family("toy") == catalogue.family("toy")
    replacement = tmp_path / "more"
    replacement.mkdir()
    write(replacement, TOY.replace('"Toy"', '"Mine"'))
    assert load_catalogue(replacement).family("toy").title == "Mine"
    monkeypatch.setenv("OVERSPILL_CATALOGUE", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="absent does not exist; see OVERSPILL_CATALOGUE"):
        load_catalogue()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('licence = "MIT"', 'license = "MIT"', r"toy\.toml:5: unknown key `license`; did you mean `licence`\?"),
        ("parameters = 10", 'parameters = "10"', r"toy\.toml:3: `parameters`.* Expected `int`, got `str`"),
        ("parameters = 10", "parameters = 0", "must be positive"),
        ("rung = 1", "rung = 2", r"rungs must be 0, 1, 2 … in this order, not \[0, 2\]"),
        ("quality = 0.9", "quality = 1.9", "quality 1.9 is outside of"),
        ("quality = 0.9", "quality = 0.0", r"quality 0.0 is outside of"),
        ("layers = [0, 2]", "layers = [2, 0]", "must ascend"),
        ("layers = [0, 2]", "layers = []", "must ascend"),
        ('"toy-int8"', '"toy-fp32"', "its name is taken"),
        ('"toy-int8"', '"toy"', "its name is taken"),
        ('"toy-int8"', '"Toy INT8"', "use lower-case letters"),
        ('name = "toy"', 'name = "../toy"', "use lower-case letters"),
        ('derived_from = "toy-fp32"', 'derived_from = "toy-fp16"', "which is not here"),
        ('precision = "int8"', 'precision = "int3"', "'int3': expected one of 'fp32', 'int8'"),
        ('"file:/models/toy.gguf"', '"ftp://toy.gguf"', "unknown scheme; known: hf, pypi"),
        ('"file:/models/toy.gguf"', '"pypi:toy/member"', "write pypi:project==version/member"),
        ('"file:/models/toy.gguf"', '"file:toy.gguf"', "give an absolute path"),
        ('"file:/models/toy.gguf"', '"http://x/y"', "plain http can be tampered with; pin its sha256"),
        ('"file:/models/toy.gguf"', '"hf:toy"', "write hf:org/repo@revision"),
        ('toy.gguf"', 'toy.gguf"\nsha256 = "ABC"', "'ABC' is no sha256"),
        ('toy.gguf"', 'toy.gguf"\nfiles = {"../x" = ""}', "not a plain file name"),
        ('"file:/models/toy.gguf"', '"https://x/y"\nfiles = {"x" = ""}', "`files` belongs to"),
        ('format = "onnx"', 'format = "onnx"\nfamily = "other"', "leave `family` out"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in TOY
    with pytest.raises(ConfigError, match=message):
        load_catalogue(write(tmp_path, TOY.replace(before, after, 1)))


def test_a_family_without_sources_or_variants_is_refused(tmp_path: Path) -> None:
    head, sources, *variants = TOY.split("[[")
    with pytest.raises(ConfigError, match="rungs must be"):
        load_catalogue(write(tmp_path, f"variants = []\n{head}[[{sources}"))
    with pytest.raises(ConfigError, match="at least one source"):
        load_catalogue(write(tmp_path, f"sources = []\n{head}[[" + "[[".join(variants)))


def test_two_families_cannot_claim_one_variant(tmp_path: Path) -> None:
    write(tmp_path, TOY)
    write(tmp_path, TOY.replace('name = "toy"', 'name = "other"'), "other.toml")
    with pytest.raises(ConfigError, match="variant `toy-fp32` of `toy` is already a variant of `other`; rename it"):
        load_catalogue(tmp_path)
    write(tmp_path, TOY.replace('"toy-int8"', '"smollm2-135m"').replace("toy-fp32", "toy-fp"), "other.toml")
    with pytest.raises(ConfigError, match="is already a family"):
        Catalogue([*load_catalogue(), *(load_catalogue(write(tmp_path, TOY.replace('"toy-int8"', '"smollm2-135m"'))))])


def test_unknown_names_list_the_known_ones(tmp_path: Path) -> None:
    catalogue = load_catalogue(write(tmp_path, TOY))
    with pytest.raises(
        ModelNotFound, match="known families: all-minilm-l6-v2, centerface, smollm2-135m, toy; a path needs a slash"
    ) as caught:
        catalogue.family("tiny")
    assert caught.value.param == "model"
    with pytest.raises(ModelNotFound, match="`toy-int8` is a variant of `toy`"):
        catalogue.family("toy-int8")
    with pytest.raises(ModelNotFound, match=r"known variants: toy-fp32, toy-int8$"):
        catalogue.variant("toy")
    with pytest.raises(ModelNotFound, match="has no variant `toy-int4`; it has: toy-fp32, toy-int8"):
        catalogue.family("toy").variant("toy-int4")


def test_a_directory_is_a_family(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    folder = tmp_path / "My Model_v1"
    model.save_pretrained(folder)
    family = load_catalogue().family(str(folder))
    assert (family.name, family.context_tokens) == ("my-model_v1", 128)
    assert family.parameters == model.num_parameters()
    assert family.sources == (Source(uri=f"dir:{folder}"),)
    assert [variant.name for variant in family.variants] == ["my-model_v1-fp32"]
    with pytest.raises(ArtifactError, match="no model at"):
        load_catalogue().family("./not-here")
