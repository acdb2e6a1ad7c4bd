"""V2's repository extension through Triton's own clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from router.base.clock import MonotonicClock
from router.base.errors import ModelNotFound
from router.tenants.keys_edit import NewKey, add_key
from router.tenants.tenancy import KeySources, Tenancy
from router.tenants.tenant import Role
from router.values.replica import ReplicaSnapshot
from router.values.repository import ModelState
from tests.support.gateway_fakes import INFOS, FakeDispatcher, Server, client_of, gateway_deps, serving

NAMES = ("tiny-int8", "tiny-fp32")


class Shelf:
    """What was asked for; `nowhere` is no model of it."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def unloaded(self) -> list[ModelState]:
        return [ModelState(name="tiny-int4", state="UNAVAILABLE", reason="unloaded"), ModelState(name="tiny-int8")]

    async def load(self, name: str) -> None:
        if name == "nowhere":
            raise ModelNotFound.of(name, ["tiny-int4"])
        self.done.append(("load", name))

    async def unload(self, name: str) -> None:
        self.done.append(("unload", name))


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def server(shelf: Shelf) -> Iterator[Server]:
    snapshots = [
        ReplicaSnapshot(INFOS[0], available=False, slots=1, why="restarting", back_in_s=3.0),
        ReplicaSnapshot(INFOS[1], available=True, slots=4),
    ]
    with serving(gateway_deps(FakeDispatcher(snapshots=snapshots), repository=shelf)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def test_the_index_tells_of_what_is_served_and_of_what_could_be(client: triton.InferenceServerClient) -> None:
    found = {entry["name"]: (entry["state"], entry["reason"]) for entry in client.get_model_repository_index()}
    assert found == {
        "tiny": ("READY", ""),
        "tiny-fp32": ("LOADING", "restarting"),
        "tiny-int8": ("READY", ""),
        "tiny-int4": ("UNAVAILABLE", "unloaded"),
    }
    ready = httpx.post(f"http://{client._parsed_url.netloc}/v2/repository/index", json={"ready": True}).json()
    assert [entry["name"] for entry in ready] == ["tiny", "tiny-int8"]


def test_the_operator_loads_and_unloads(client: triton.InferenceServerClient, shelf: Shelf) -> None:
    client.load_model("tiny-int4")
    client.unload_model("tiny-int8", unload_dependents=True)
    assert shelf.done == [("load", "tiny-int4"), ("unload", "tiny-int8")]
    with pytest.raises(InferenceServerException, match="nowhere"):
        client.load_model("nowhere")
    with pytest.raises(InferenceServerException, match=r"parameters\.config"):
        client.load_model("tiny-int4", config='{"max_batch_size": 4}')
    assert len(shelf.done) == 2


async def test_a_tier_that_cannot_says_so() -> None:
    async with client_of(gateway_deps()) as http:
        reply = await http.post("/v2/repository/models/tiny-int8/unload", json={})
        assert (reply.status_code, "configuration" in reply.json()["error"]) == (400, True)
        path, form = "/v2/repository/models/tiny-int8/unload", {"content-type": "text/plain"}
        assert (await http.post(path, content="a=b", headers=form)).status_code == 415, "no page may send it unasked"
        index = (await http.post("/v2/repository/index")).json()
    assert {entry["name"] for entry in index} == {"tiny", "tiny-fp32", "tiny-int8"}


def tenants(path: Path) -> tuple[Tenancy, dict[Role, dict[str, str]]]:
    """One tenant, who may know of `tiny-int8` alone, with a key of each role."""
    keys = {role: add_key(path, NewKey("acme", role=role), {"models": ("tiny-int8",)}) for role in Role}
    tenancy = Tenancy(KeySources(path=path).directory(), MonotonicClock())
    return tenancy, {role: {"authorization": f"Bearer {key}"} for role, key in keys.items()}


async def test_each_key_sees_and_changes_what_its_role_may(shelf: Shelf, tmp_path: Path) -> None:
    tenancy, keys = tenants(tmp_path / "keys")
    async with client_of(gateway_deps(tenancy=tenancy, repository=shelf)) as http:
        for role, stats, unload in ((Role.CALLER, 403, 403), (Role.MONITOR, 200, 403), (Role.OPERATOR, 200, 200)):
            for path in ("/v2/models/stats", "/v2/models/tiny-int8/stats"):
                assert (await http.get(path, headers=keys[role])).status_code == stats
            reply = await http.post("/v2/repository/models/tiny-int8/unload", headers=keys[role])
            assert reply.status_code == unload
        index = (await http.post("/v2/repository/index", headers=keys[Role.CALLER])).json()
        assert [entry["name"] for entry in index] == ["tiny-int8"], "other models are none of its business"
        for path in ("", "/config", "/ready"):
            found = [(await http.get(f"/v2/models/{m}{path}", headers=keys[Role.CALLER])).status_code for m in NAMES]
            assert found == [200, 404]
    assert shelf.done == [("unload", "tiny-int8")]


async def test_each_prompt_of_a_batch_counts_against_the_limits_of_its_tenant(tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys", NewKey("acme"), {"requests_per_minute": 3})
    tenancy = Tenancy(KeySources(path=tmp_path / "keys").directory(), MonotonicClock())
    async with client_of(gateway_deps(tenancy=tenancy), key) as http:
        text = {"name": "text_input", "datatype": "BYTES", "shape": [5], "data": [f"say {n}" for n in range(5)]}
        outputs = (await http.post("/v2/models/tiny/infer", json={"inputs": [text]})).json()["outputs"]
    told = {output["name"]: output["data"] for output in outputs}
    assert len([answer for answer in told["text_output"] if answer]) == 3
    assert len([error for error in told["error"] if error]) == 2
