"""Chat templates for models that other servers serve: by a path, by the store, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.catalogue.families import Catalogue, Family, Source, Variant
from models.store.store import ModelStore
from models.store.templates import templates_in
from models.text.chat import ChatTemplate
from models.text.tokenizer import Tokenizer
from router.base.errors import ArtifactError
from router.values.prompt import ChatPrompt, Message
from tests.support.tiny_tokenizer import backend

CHAT = ChatPrompt((Message("user", "hello"),))


def written(folder: Path, template: str = "{% for m in messages %}[{{ m.content }}]{% endfor %}") -> Path:
    folder.mkdir()
    Tokenizer(backend(), eos_ids=[2], bos_id=1, adds_bos=False).save(folder)
    if template:
        ChatTemplate(template).save(folder)
    return folder


def catalogue(uri: str) -> Catalogue:
    variants = (
        Variant(name="toy-fp32", rung=0, quality=1.0, quality_measured="-", precision="fp32", format="weights"),
    )
    family = Family(
        name="toy",
        title="-",
        parameters=1,
        context_tokens=64,
        licence="-",
        sources=(Source(uri=uri),),
        variants=variants,
    )
    return Catalogue([family])


def test_a_known_model_s_template_comes_from_the_store(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    (folder / "config.json").write_text("{}")
    known = catalogue(f"dir:{folder}")
    render = templates_in(known, ModelStore(tmp_path / "store", known))("toy", "")
    assert render is not None
    assert render(CHAT, "") == "[hello]"


def test_a_known_model_that_was_not_pulled_has_none(tmp_path: Path) -> None:
    known = catalogue("https://models.example/toy.gguf")
    assert templates_in(known, ModelStore(tmp_path / "store", known))("toy", "") is None


def test_a_path_is_read_once(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    find = templates_in(Catalogue([]), ModelStore(tmp_path / "store", Catalogue([])))
    render = find("anything", str(folder))
    assert render is not None
    assert render(CHAT, "so far") == "[hello]so far"
    (folder / "tokenizer.json").unlink()
    assert find("anything", str(folder)) == render


def test_a_model_without_template_has_none(tmp_path: Path) -> None:
    find = templates_in(Catalogue([]), ModelStore(tmp_path / "store", Catalogue([])))
    assert find("anything", str(written(tmp_path / "model", ""))) is None
    assert find("anything", "") is None


def test_a_path_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    find = templates_in(Catalogue([]), ModelStore(tmp_path / "store", Catalogue([])))
    with pytest.raises(ArtifactError, match="nowhere"):
        find("anything", str(tmp_path / "nowhere"))
