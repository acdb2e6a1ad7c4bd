"""Pipelines that the configuration declares, as this tier serves them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from models.catalogue.families import Catalogue
from models.pipelines.declared.assembly import assemble, check_ladders, info_of, plan_of, served
from models.pipelines.declared.contract import Contract
from models.pipelines.declared.settings import PipelineSettings
from models.pipelines.kinds.registry import Supplies
from models.pipelines.replica import ServedPipeline
from models.store.store import ModelStore


def line_up_pipelines(
    pipelines: Sequence[PipelineSettings], catalogue: Catalogue, store: ModelStore
) -> tuple[ServedPipeline, ...]:
    """Assemble every declared pipeline. Imports functions of pools of threads; loads no model.

    Raises:
        ConfigError: a stage is wrong, or rungs of a family differ; names pipeline, stage and remedy.
        ArtifactError, ModelNotFound: what a stage needs is not here.
    """

    def source(name: str) -> tuple[Path, Contract | None]:
        known = {family.name for family in catalogue}
        return store.source_path(name if name in known else catalogue.family_of(name).name), None

    checked = [assemble(settings, Supplies(source)) for settings in pipelines]
    check_ladders(checked)
    return tuple(served(one, info_of(one.settings, one, "cloud", "cloud"), partial(plan_of, one)) for one in checked)
