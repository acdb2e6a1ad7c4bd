"""Chat templates of models that other servers serve: from a path that is configured, or from the store."""

from __future__ import annotations

from pathlib import Path

from models.catalogue.families import Catalogue
from models.store.store import ModelStore
from models.text.chat import PromptEncoder
from router.base.errors import ArtifactMissing
from router.values.template import Render, Renderers


def templates_in(catalogue: Catalogue, store: ModelStore) -> Renderers:
    """Return a look-up of chat templates, each read when it is first asked for."""
    families = {family.name: family for family in catalogue}
    read: dict[Path, PromptEncoder] = {}

    def find(model: str, path: str) -> Render | None:
        """Return what renders for a family of the catalogue, or by the files at `path`; None where neither is there.

        Raises:
            ArtifactError: the file is missing at `path`, or one is damaged.
        """
        family = None if path else families.get(model)
        if family is None and not path:
            return None
        try:
            source = Path(path).expanduser() if family is None else store.source_path(family)
        except ArtifactMissing:
            return None
        if source not in read:
            read[source] = PromptEncoder.load(source, prepend_bos=family.prepend_bos if family else None)
        encoder = read[source]
        return encoder.render if encoder.template is not None else None

    return find
