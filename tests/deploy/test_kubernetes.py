"""The manifests: Kubernetes knows what they say, a tier tells what KEDA reads, and drains have their time."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import kubernetes_validate
import msgspec
import pytest
import yaml

from cloud_tier import config as cloud_config
from cloud_tier.scaling.scaler import PoolLoad, Scaler
from cloud_tier.scaling.settings import ScalingSettings
from edge_agent.config import EdgeConfig
from router.base import config
from router.gateway.auth import OPEN_PATHS
from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "deploy/kubernetes"
NEWEST = "1.34"
ENDS_S = 10  # engines and connections, after the last stream
OVERLAYS = sorted(
    str(path.parent.relative_to(FOLDER))
    for path in FOLDER.rglob("kustomization.yaml")
    if path.parent.name not in {"base", "trigger"}
)

each_overlay = pytest.mark.parametrize("name", OVERLAYS)


def merged(below: Any, above: Any) -> Any:
    """Kubernetes' strategic merge, as far as these patches use it: mappings by key, lists of named things by name."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {key: merged(below.get(key), above[key]) if key in above else below[key] for key in {**below, **above}}
    if isinstance(below, list) and isinstance(above, list) and all("name" in item for item in [*below, *above]):
        by_name = {item["name"]: item for item in below}
        for item in above:
            by_name[item["name"]] = merged(by_name.get(item["name"]), item)
        return list(by_name.values())
    return above


def documents(path: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(path.read_text(encoding="utf-8")) if found]


def built(folder: Path) -> list[dict[str, Any]]:
    """Return what a kustomization comes to: resources, patches and generated config maps."""
    (asked,) = documents(folder / "kustomization.yaml")
    found: list[dict[str, Any]] = []
    for name in asked.get("resources", ()):
        path = (folder / name).resolve()
        found += built(path) if path.is_dir() else documents(path)
    for patch in asked.get("patches", ()):
        (above,) = documents(folder / patch["path"])
        of = [doc for doc in found if _key(doc) == _key(above)]
        assert len(of) == 1, f"{folder}/{patch['path']} patches nothing"
        found[found.index(of[0])] = merged(of[0], above)
    for made in asked.get("configMapGenerator", ()):
        data = {name: (folder / name).read_text(encoding="utf-8") for name in made["files"]}
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    return found


def _key(document: dict[str, Any]) -> tuple[str, str]:
    return document["kind"], document["metadata"]["name"]


def pods(name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every workload of an overlay with the spec of its pods."""
    for document in built(FOLDER / name):
        if document["kind"] in {"Deployment", "DaemonSet"}:
            yield document, document["spec"]["template"]["spec"]


def test_kubernetes_takes_them() -> None:
    different = {json.dumps(document): document for name in OVERLAYS for document in built(FOLDER / name)}
    known = [document for document in different.values() if not document["apiVersion"].startswith("keda.sh/")]
    assert {document["kind"] for document in known} >= {"Deployment", "DaemonSet", "HorizontalPodAutoscaler"}
    for document in known:
        kubernetes_validate.validate(document, NEWEST, strict=True)


def test_the_check_itself_can_fail() -> None:
    (deployment,) = documents(FOLDER / "cloud/base/deployment.yaml")
    wrong = merged(deployment, {"spec": {"template": {"spec": {"terminationGracePeriodSecond": 3}}}})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


@each_overlay
def test_the_files_of_an_overlay_are_all_used(name: str) -> None:
    (asked,) = documents(FOLDER / name / "kustomization.yaml")
    used = {*asked.get("resources", ()), *(patch["path"] for patch in asked.get("patches", ()))}
    used |= {file for made in asked.get("configMapGenerator", ()) for file in made["files"]}
    there = {path.name for path in (FOLDER / name).iterdir() if path.is_file()} - {"kustomization.yaml"}
    assert there <= used


class Trigger(msgspec.Struct, forbid_unknown_fields=True):
    """KEDA's metrics-api scaler, as these manifests use it."""

    class Metadata(msgspec.Struct, forbid_unknown_fields=True):
        url: Annotated[str, msgspec.Meta(pattern="^https?://")]
        valueLocation: str  # noqa: N815 - KEDA's own names, here and below
        targetValue: Annotated[str, msgspec.Meta(pattern=r"^[0-9.]+$")]  # noqa: N815
        authMode: Literal["bearer"]  # noqa: N815
        aggregateFromKubeServiceEndpoints: Literal["true", "false"] = "false"  # noqa: N815
        aggregationType: Literal["average", "sum", "max", "min"] = "average"  # noqa: N815

    class Reference(msgspec.Struct, forbid_unknown_fields=True):
        name: str

    type: Literal["metrics-api"]
    metricType: Literal["AverageValue", "Value"]  # noqa: N815
    metadata: Metadata
    authenticationRef: Reference  # noqa: N815


class ScaledObject(msgspec.Struct, forbid_unknown_fields=True):
    """The spec of `keda.sh/v1alpha1` ScaledObject, without what these manifests leave out."""

    class Advanced(msgspec.Struct, forbid_unknown_fields=True):
        horizontalPodAutoscalerConfig: dict[Literal["behavior"], dict[str, Any]]  # noqa: N815

    scaleTargetRef: dict[Literal["name"], str]  # noqa: N815
    minReplicaCount: Annotated[int, msgspec.Meta(ge=0)]  # noqa: N815
    maxReplicaCount: Annotated[int, msgspec.Meta(ge=1)]  # noqa: N815
    pollingInterval: Annotated[int, msgspec.Meta(ge=1)]  # noqa: N815
    triggers: list[Trigger]
    advanced: Advanced
    cooldownPeriod: Annotated[int, msgspec.Meta(ge=0)] = 300  # noqa: N815


def scaled_objects() -> list[tuple[str, ScaledObject]]:
    return [
        (name, msgspec.convert(document["spec"], ScaledObject))
        for name in OVERLAYS
        for document in built(FOLDER / name)
        if document["kind"] == "ScaledObject"
    ]


def test_keda_reads_what_a_tier_tells() -> None:
    objects = scaled_objects()
    assert {name for name, _ in objects} == {"autoscaling/keda", "router"}
    scaler = Scaler(ScalingSettings(), 0.0, default_ttft_s=3.0)
    advice = scaler.advise(1.0, PoolLoad(ready=1, starting=0, slots=4, running=0, waiting=0))
    workloads = {_key(w): w for name in ("router", "cloud/overlays/cpu") for w, _ in pods(name)}
    services = {
        doc["metadata"]["name"]: doc
        for name in ("router", "cloud/overlays/cpu")
        for doc in built(FOLDER / name)
        if doc["kind"] == "Service"
    }
    for _, asked in objects:
        assert ("Deployment", asked.scaleTargetRef["name"]) in workloads
        (trigger,) = asked.triggers
        host, port, path = re.fullmatch(r"http://([^:/]+):(\d+)(/.*)", trigger.metadata.url).groups()  # type: ignore[union-attr]
        assert path == "/v1/scale"
        service, namespace, *_ = host.split(".")
        assert namespace == "overspill"
        assert int(port) in {entry["port"] for entry in services[service]["spec"]["ports"]}
        assert isinstance(getattr(advice, trigger.metadata.valueLocation), float | int)
        assert (trigger.metricType, trigger.metadata.targetValue) == (
            "AverageValue",
            "1",
        )  # desired = the value, rounded up
        whole = trigger.metadata.valueLocation == "desired"
        assert (
            trigger.metadata.aggregationType == "sum"
        ) is not whole  # each pod its own load, or one router all of it


def test_the_bounds_of_keda_are_those_of_the_law() -> None:
    for name, asked in scaled_objects():
        if name == "router":
            scaling = cloud_config.load(FOLDER / "router/cloud.toml", environ={}).scaling
            assert (asked.minReplicaCount, asked.maxReplicaCount) == (scaling.min_replicas, scaling.max_replicas)
            assert asked.cooldownPeriod <= scaling.idle_s


@each_overlay
def test_configurations_are_good(name: str) -> None:
    for document in built(FOLDER / name):
        if document["kind"] != "ConfigMap":
            continue
        for file in document["data"]:
            if file == "cloud.toml":
                cloud_config.load(FOLDER / name / file, environ={})
            else:
                config.load(FOLDER / name / file, EdgeConfig, environ={})


@each_overlay
def test_a_drain_has_its_time(name: str) -> None:
    """Grace ≥ the pause before SIGTERM + what streams may take + what engines take to end."""
    folder = FOLDER / name
    for document, pod in pods(name):
        (container,) = pod["containers"]
        pause_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
        drain_s = 0.0
        if (folder / "cloud.toml").exists() and document["metadata"]["name"] != "vllm":
            drain_s = cloud_config.load(folder / "cloud.toml", environ={}).server.drain_s
        elif (folder / "edge.toml").exists():
            drain_s = config.load(folder / "edge.toml", EdgeConfig, environ={}).agent.drain_deadline_s
        assert pod["terminationGracePeriodSeconds"] >= pause_s + drain_s + ENDS_S


@each_overlay
def test_probes_ask_pages_that_are_open(name: str) -> None:
    for document, pod in pods(name):
        for container in pod["containers"]:
            ports = {port["name"] for port in container["ports"]}
            probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness")]
            if "livenessProbe" in container:
                probes.append(container["livenessProbe"]["httpGet"])
            assert {probe["port"] for probe in probes} <= ports
            if document["metadata"]["name"] != "vllm":
                assert {probe["path"] for probe in probes} <= OPEN_PATHS


@each_overlay
def test_workloads_are_confined(name: str) -> None:
    for document, pod in pods(name):
        if document["metadata"]["name"] == "vllm":
            continue
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in [*pod["containers"], *pod.get("initContainers", ())]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["resources"]["limits"]["memory"]


def test_every_deployment_has_a_disruption_budget_that_lets_nodes_go() -> None:
    for name in ("cloud/overlays/gpu", "router"):
        budgets = [doc["spec"] for doc in built(FOLDER / name) if doc["kind"] == "PodDisruptionBudget"]
        assert budgets
        assert all(budget["maxUnavailable"] == 1 for budget in budgets)


def test_gpus_and_slices_are_asked_for_by_their_names() -> None:
    limits = {
        name: next(pods(f"cloud/overlays/{name}"))[1]["containers"][0]["resources"]["limits"]
        for name in ("cpu", "gpu", "mig")
    }
    assert limits["gpu"]["nvidia.com/gpu"] == "1"
    assert [key for key in limits["mig"] if key.startswith("nvidia.com/mig-")]
    assert not [key for key in limits["cpu"] if key.startswith("nvidia.com/")]


@pytest.mark.parametrize("tier", ["cloud", "edge"])
def test_container_files_copy_what_is_there(tier: str) -> None:
    text = (REPOSITORY / f"deploy/containers/{tier}.Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert {path for path in copied if not (REPOSITORY / path).exists()} == set()
    extras = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    (extra,) = re.findall(r"^ARG EXTRA=(\S+)$", text, re.MULTILINE)
    assert f"\n{extra} = [" in extras
    assert "USER 10001" in text
    assert ("OVERSPILL_COMPILE" in text) == ("setup.py" in copied), "without setup.py the wish is passed over"


@pytest.mark.process
@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed: this test's own merge stands alone"
)
@each_overlay
def test_kustomize_comes_to_the_same(name: str) -> None:
    asked = subprocess.run(["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, check=True)
    theirs = [found for found in yaml.safe_load_all(asked.stdout) if found]
    assert sorted(doc["kind"] for doc in theirs) == sorted(doc["kind"] for doc in built(FOLDER / name))
    ours = {_key(document): pod for document, pod in pods(name)}
    for document in theirs:
        if _key(document) in ours:
            pod = ours[_key(document)]
            spec = document["spec"]["template"]["spec"]
            assert spec["containers"][0]["resources"] == pod["containers"][0]["resources"]
