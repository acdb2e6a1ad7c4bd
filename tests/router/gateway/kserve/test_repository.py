"""V2's repository extension through Triton's own clients."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from router.base.errors import ModelNotFound
from router.values.replica import ReplicaSnapshot
from router.values.repository import ModelState
from tests.support.gateway_fakes import INFOS, FakeDispatcher, Server, client_of, gateway_deps, serving


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
        "tiny-fp32": ("LOADING", "restarting"),
        "tiny-int8": ("READY", ""),
        "tiny-int4": ("UNAVAILABLE", "unloaded"),
    }
    ready = httpx.post(f"http://{client._parsed_url.netloc}/v2/repository/index", json={"ready": True}).json()
    assert [entry["name"] for entry in ready] == ["tiny-int8"]


def test_the_operator_loads_and_unloads(client: triton.InferenceServerClient, shelf: Shelf) -> None:
    client.load_model("tiny-int4")
    client.unload_model("tiny-int8", unload_dependents=True)
    assert shelf.done == [("load", "tiny-int4"), ("unload", "tiny-int8")]
    with pytest.raises(InferenceServerException, match="nowhere"):
        client.load_model("nowhere")
    with pytest.raises(InferenceServerException, match=r"parameters\.config"):
        client.load_model("tiny-int4", config='{"max_batch_size": 4}')
    assert len(shelf.done) == 2


async def test_a_callers_key_changes_nothing(shelf: Shelf) -> None:
    async with client_of(gateway_deps(api_keys={"k": 0}, repository=shelf), "k") as http:
        for what in ("load", "unload"):
            reply = await http.post(f"/v2/repository/models/tiny-int8/{what}")
            assert (reply.status_code, list(reply.json())) == (403, ["error"])
        assert (await http.post("/v2/repository/index")).status_code == 200
    assert not shelf.done


async def test_a_tier_that_cannot_says_so() -> None:
    async with client_of(gateway_deps()) as http:
        reply = await http.post("/v2/repository/models/tiny-int8/unload", json={})
        assert (reply.status_code, "configuration" in reply.json()["error"]) == (400, True)
        path, form = "/v2/repository/models/tiny-int8/unload", {"content-type": "text/plain"}
        assert (await http.post(path, content="a=b", headers=form)).status_code == 415, "no page may send it unasked"
        index = (await http.post("/v2/repository/index")).json()
    assert {entry["name"] for entry in index} == {"tiny-fp32", "tiny-int8"}


async def test_statistics_are_of_everybody_and_so_for_monitors_alone() -> None:
    async with client_of(gateway_deps(api_keys={"k": 0}), "k") as http:
        for path in ("/v2/models/stats", "/v2/models/tiny/stats"):
            assert (await http.get(path)).status_code == 403
