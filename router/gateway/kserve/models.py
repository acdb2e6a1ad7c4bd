"""The models that V2 speaks of: families and variants, each in one version."""

from __future__ import annotations

import time
from collections.abc import Sequence

from router.base.errors import ModelNotFound, OverspillError, Unavailable
from router.gateway.endpoint import RequestContext, draining_or_starting
from router.gateway.intake import Intake
from router.gateway.tenant_routes import require_monitor
from router.values.replica import ReplicaInfo
from router.values.status import Tally
from router.values.task import Task
from router.values.tensors import Signature
from router.wire.kserve.call import VERSION
from router.wire.kserve.model import signature_of
from router.wire.kserve.statistics import model_statistics


class Models:
    """Looks up what a path or a message names."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._deps = intake.deps

    def require(self, context: RequestContext) -> str:
        """Return the name of the model that the path asks for inference.

        Raises:
            ModelNotFound: nobody serves it, or it has no such version.
            Unavailable: an upstream that might serve it was never reached, or no model is known yet.
        """
        name: str = context.params["model"]
        self._intake.require_model(context, name)
        _refuse_other_versions(context)
        return name

    def embeds(self, model: str) -> bool:
        """Whether a model turns texts into vectors, instead of going on with them."""
        infos = [info for info in self._deps.models() if model in {info.family, info.variant}]
        return bool(infos) and all(Task.GENERATE not in info.tasks for info in infos)

    def signature(self, model: str) -> Signature | None:
        """Return the tensors of a pipeline, None for any other model."""
        return signature_of([info for info in self._deps.models() if model in {info.family, info.variant}])

    def replicas(self, context: RequestContext) -> list[ReplicaInfo]:
        """Return the replicas of the model in the path.

        Raises:
            ModelNotFound: no such model, or no such version of it.
            Unavailable: no such model here, and an upstream that might serve it was never reached.
        """
        name = context.params["model"]
        known = self._deps.models()
        found = [info for info in known if name in {info.family, info.variant} and context.caller.may_use(name)]
        if not found or not context.caller.may_use(name):
            names = {n for info in known for n in (info.family, info.variant)}
            raise self._intake.not_served(context, name, names)
        _refuse_other_versions(context)
        return found

    def require_ready(self, context: RequestContext) -> None:
        """Check that a replica of the model in the path can take a request now.

        Raises:
            ModelNotFound, Unavailable: as `replicas`; or none can.
        """
        found = self.replicas(context)
        refusal = draining_or_starting(self._deps) or self._unready(context.params["model"], found)
        if refusal is not None:
            raise refusal

    def slots(self, replicas: Sequence[ReplicaInfo]) -> int:
        """Return how many answers these replicas compute at once, 0 where that is not known."""
        wanted = {info.replica_id for info in replicas}
        return sum(s.slots for s in self._deps.dispatcher.load() if s.info.replica_id in wanted)

    def statistics(self, context: RequestContext) -> list[dict[str, object]]:
        """Return what the model in the path has served, or every model where it names none.

        Raises:
            Forbidden: the key is a tenant's own, and the figures are of everybody together.
            ModelNotFound, Unavailable: as `replicas`.
        """
        require_monitor(context)
        now_s, wall_s = self._deps.clock.now_s(), time.time()
        tallies = self._deps.dispatcher.tallies()

        def told(name: str, variants: set[str]) -> dict[str, object]:
            tally = sum((t for (_, variant), t in tallies.items() if variant in variants), start=Tally())
            last_ms = 0 if tally.last_at_s is None else int((wall_s - now_s + tally.last_at_s) * 1000)
            return model_statistics(name, tally, last_ms)

        if "model" in context.params:
            return [told(context.params["model"], {info.variant for info in self.replicas(context)})]
        variants = dict.fromkeys(info.variant for info in self._deps.models())
        return [told(variant, {variant}) for variant in variants]

    def _unready(self, name: str, replicas: Sequence[ReplicaInfo]) -> OverspillError | None:
        wanted = {info.replica_id for info in replicas}
        snapshots = [s for s in self._deps.dispatcher.load() if s.info.replica_id in wanted]
        if any(snapshot.available for snapshot in snapshots):
            return None
        why = "; ".join(dict.fromkeys(s.why for s in snapshots if s.why)) or "no replica is available"
        return Unavailable(f"`{name}` is not ready: {why}", retry_after_s=self._deps.limits.retry_after_s)


def _refuse_other_versions(context: RequestContext) -> None:
    name, version = context.params["model"], context.params.get("version", VERSION)
    if version != VERSION:
        raise ModelNotFound(f"`{name}` has version {VERSION} only, not `{version[:40]}`", param="version")
