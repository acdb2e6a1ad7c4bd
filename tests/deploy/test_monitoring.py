"""Dashboards and rules ask for what both tiers really show: each query is held against their own `/metrics`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from router.values.request import Outcome
from router.values.status import TierStatus, decode
from tests.support.monitored import Monitored, monitored
from tests.support.paths import REPOSITORY
from tests.support.ports import unused_port
from tests.support.promql import TARGET, Scraped, Wrong
from tests.support.tiny_store import build_world
from tests.support.waiting import until_answered

GRAFANA, PROMETHEUS = REPOSITORY / "deploy/grafana", REPOSITORY / "deploy/prometheus"
BOARDS = sorted(GRAFANA.glob("*.json"))
RULES = sorted(PROMETHEUS.glob("*.rules.yml"))
VARIABLES = {"$__rate_interval": "1m", "$job": ".+", "$instance": ".+"}
# Of a label whose values are words of the code: those that no page happens to have now.
WORDS = {"outcome": {outcome.value for outcome in Outcome}}


def filled(expr: str) -> str:
    """Return a query as Grafana sends it."""
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, f"a variable that no dashboard has: {expr}"
    return expr


def targets(board: Path) -> Iterator[tuple[str, str, str]]:
    """Yield panel, query and legend of every query of a dashboard."""
    tree = json.loads(board.read_text(encoding="utf-8"))
    panels = [*tree["panels"], *(inner for panel in tree["panels"] for inner in panel.get("panels", ()))]
    for panel in panels:
        for target in panel.get("targets", ()):
            yield panel["title"], filled(target["expr"]), target["legendFormat"]


def rules() -> Iterator[dict[str, Any]]:
    for path in RULES:
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


QUERIES = [(panel, expr, legend) for board in BOARDS for panel, expr, legend in targets(board)]


Served = tuple[dict[str, str], dict[str, TierStatus]]


async def _served(folder: Path) -> Served:
    async with monitored(build_world(folder / "world"), folder) as stack:
        tiers = {"edge": stack.edge, "cloud": stack.cloud}
        told = {name: decode((await client.get("/v1/status")).content) for name, client in tiers.items()}
        return await stack.pages(), told


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """The pages of `/metrics` and the statuses of two tiers that have served, by tier."""
    return asyncio.run(_served(tmp_path_factory.mktemp("monitored")))


@pytest.fixture(scope="module")
def scraped(served: Served) -> Scraped:
    """Both pages, and with them what the recording rules make of them, in their order."""
    found = Scraped(values=WORDS)
    for page in served[0].values():
        found.read(page)
    for rule in rules():
        if "record" in rule:
            found.recorded[rule["record"]] = found.labels_of(rule["expr"])
    return found


@pytest.mark.parametrize(("panel", "expr", "legend"), QUERIES, ids=[f"{q[0]}-{n}" for n, q in enumerate(QUERIES)])
def test_a_panel_asks_for_what_there_is(scraped: Scraped, panel: str, expr: str, legend: str) -> None:
    labels = scraped.labels_of(expr)
    named = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert named <= labels, f"{panel}: the legend names {sorted(named - labels)}, the query gives {sorted(labels)}"


@pytest.mark.parametrize("rule", list(rules()), ids=lambda rule: rule.get("record") or rule["alert"])
def test_a_rule_asks_for_what_there_is(scraped: Scraped, rule: dict[str, Any]) -> None:
    labels = scraped.labels_of(rule["expr"])
    if "alert" in rule:
        assert rule["labels"]["severity"] in {"critical", "warning"}
        told = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", told)) <= labels
        assert {"summary", "remedy"} == set(rule["annotations"])
        assert set(TARGET) <= labels, "an alert says which tier"


def test_both_tiers_tell_an_operator_what_they_are(served: Served) -> None:
    edge, cloud = served[1]["edge"], served[1]["cloud"]
    own = {replica.variant: replica for replica in edge.router.replicas if not replica.remote}
    loaded = own["tiny-int8"].facts
    assert (edge.tier, edge.ready, loaded.kind, loaded.cold_starts) == ("edge", True, "onnx", 1)
    assert loaded.software.startswith("onnxruntime")
    assert loaded.version.startswith("sha256:")
    assert loaded.computes_on == ("CPUExecutionProvider",)
    assert own["tiny-pruned-int8"].facts.cold_starts == 0
    assert {replica.facts.kind for replica in edge.router.replicas if replica.remote} == {"overspill"}
    best, small = (replica.facts for replica in cloud.router.replicas)
    assert (best.kind, best.cold_starts, small.cold_starts, best.kv_usage) == ("torch", 2, 1, 0.0)
    assert [gpu.name for gpu in cloud.gpus.gpus] == ["H100"]
    assert edge.gpus.gpus == ()
    for status in (edge, cloud):
        assert (status.router.waiting, status.router.running, status.in_flight) == (0, 0, 0)
        assert {replica.breaker for replica in status.router.replicas} == {"closed"}


def test_what_is_not_there_is_found(scraped: Scraped) -> None:
    """The check itself can fail."""
    for wrong in (
        "overspill_requests_waiting",
        "rate(overspill_requests[5m])",
        "sum by (model) (overspill_num_requests_waiting)",
        'overspill_promises_total{kept="true"}',
        'overspill_requests_total{outcome=~"failed|lost"}',
        'overspill_num_requests_waiting{queue=""}',
        "histogram_quantile(0.9, sum by (tier) (rate(overspill_ttft_seconds_bucket[5m])))",
        "sum by (job) (overspill_overloaded) / sum by (instance) (overspill_overloaded)",
        "overspill:no_such_record",
    ):
        with pytest.raises(Wrong):
            scraped.labels_of(wrong)
    assert scraped.labels_of("sum by (job) (overspill_overloaded)") == {"job"}


def test_a_dashboard_is_whole() -> None:
    assert BOARDS
    for board in BOARDS:
        tree = json.loads(board.read_text(encoding="utf-8"))
        ids = [panel["id"] for panel in tree["panels"]]
        assert len(ids) == len(set(ids))
        places = [panel["gridPos"] for panel in tree["panels"]]
        cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
        assert len(cells) == len(set(cells)), "panels lie over each other"
        assert max(x for x, _ in cells) < 24
        assert {"datasource", *(name[1:] for name in VARIABLES if not name.startswith("$__"))} == {
            variable["name"] for variable in tree["templating"]["list"]
        }


def test_the_page_names_every_alert() -> None:
    """docs/operations.md says what each alert means, and no other."""
    page = (REPOSITORY / "docs/operations.md").read_text(encoding="utf-8")
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert set(re.findall(r"`(Overspill[A-Z]\w+)`", page)) == alerts


@pytest.mark.process
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", *(path.name for path in RULES)),
        ("test", "rules", "overspill.test.yml"),
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    done = subprocess.run([promtool, *words], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.live
@pytest.mark.process
async def test_a_real_prometheus_answers_every_query(tmp_path: Path) -> None:
    """It scrapes both tiers under traffic and evaluates the rules; then every query of every panel has a result."""
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    async with monitored(build_world(tmp_path / "world"), tmp_path) as stack:
        port = unused_port()
        config = _config(tmp_path, {"overspill-edge": stack.edge, "overspill-cloud": stack.cloud})
        process = await asyncio.create_subprocess_exec(
            prometheus,
            f"--config.file={config}",
            f"--web.listen-address=127.0.0.1:{port}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            "--log.level=error",
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=20) as api:
                await _scraped_under_traffic(stack, api)
                empty = []
                for panel, expr, _ in QUERIES:
                    if not await _result(api, expr.replace("[1m]", "[10s]")):
                        empty.append(f"{panel}: {expr}")
                assert not empty
                recorded = [rule["record"] for rule in rules() if "record" in rule]
                assert [name for name in recorded if not await _result(api, name)] == []
                told = (await api.get("/rules")).json()["data"]["groups"]
                assert {rule["health"] for group in told for rule in group["rules"]} == {"ok"}
        finally:
            process.terminate()
            await process.wait()


def _config(folder: Path, tiers: dict[str, httpx.AsyncClient]) -> Path:
    tree = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(path) for path in RULES],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{client.base_url.port}"]}]}
            for job, client in tiers.items()
        ],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


async def _scraped_under_traffic(stack: Monitored, api: httpx.AsyncClient) -> None:
    """Return when Prometheus has seen every counter before and after more traffic."""

    async def up() -> bool:
        try:
            return len(await _result(api, "up == 1")) == 2
        except (httpx.HTTPError, json.JSONDecodeError):  # while it starts it says so, in words
            return False

    await until_answered(up, every_s=0.1)
    for _ in range(3):
        await stack.traffic()
        await asyncio.sleep(1.5)


async def _result(api: httpx.AsyncClient, expr: str) -> list[Any]:
    reply = (await api.get("/query", params={"query": expr})).json()
    assert reply["status"] == "success", reply
    found: list[Any] = reply["data"]["result"]
    return found
