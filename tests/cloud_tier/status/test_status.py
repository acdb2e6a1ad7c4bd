"""`overspill cloud status`: what is shown of a tier that runs, and what is said where none does."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import trustme
from rich.console import Console
from typer.testing import CliRunner

from cloud_tier import cli
from cloud_tier.status import watch as watching
from cloud_tier.status.show import lasted, tier_as_table
from router.base.errors import ConfigError, OverspillError, ReplicaUnreachable, Unauthenticated
from router.client.tier import TierAddress
from router.values.status import (
    GpuReadings,
    GpuStatus,
    ReplicaFacts,
    ReplicaStatus,
    RouterStatus,
    TierStatus,
    decode,
    encode,
)
from tests.support.gateway_fakes import FakeDispatcher, Server, gateway_deps, serving
from tests.support.ports import refused_port

KEY = "k" * 24
ENGINE = ReplicaStatus(
    replica="engine/smollm2-135m-pruned-int8-with-a-long-name",
    endpoint="engine/smollm2-135m",
    device="engine/smollm2-135m",
    tier="cloud",
    family="smollm2-135m",
    variant="smollm2-135m-pruned-int8",
    rung=12,
    quality=0.98,
    context_tokens=8192,
    remote=False,
    available=True,
    slots=1024,
    running=1024,
    waiting=999,
    load_running=1024,
    load_queued=999,
    breaker="closed",
    facts=ReplicaFacts(
        kind="torch",
        software="torch 2.13.0",
        version="sha256:0123456789abcdef",
        kv_usage=1.0,
        cold_starts=12,
        cold_start_s=61.25,
        computes_on=("cuda (NVIDIA H100)", "cuda (NVIDIA H100)"),
    ),
)
ABOVE = msgspec.structs.replace(
    ENGINE,
    replica="https://region.example:8700/smollm2-1.7b",
    remote=True,
    available=False,
    why="unreachable: no answer to a probe within 3 s",
    back_in_s=65.0,
    breaker="half_open",
    breaker_why="no answer",
    load_age_s=4.2,
    facts=ReplicaFacts(kind="overspill"),
)
GPU = GpuStatus(
    index="0",
    uuid="GPU-1",
    name="NVIDIA H100 80GB HBM3",
    memory_used_bytes=70 << 30,
    memory_total_bytes=80 << 30,
    utilization=1.0,
    power_w=700.4,
    temperature_c=71.0,
    throttled=("power cap",),
)
STATUS = TierStatus(
    tier="cloud",
    overspill="0.1.0",
    ready=True,
    up_s=11_045.0,
    in_flight=2024,
    router=RouterStatus(
        policy="slo-utility", waiting=1011, queued=12, running=1024, overloaded=True, replicas=(ENGINE, ABOVE)
    ),
    notices=("the disk is full",),
    gpus=GpuReadings(gpus=(GPU, GpuStatus(index="0:1", uuid="MIG-2", name="H100 MIG 1g.10gb"))),
)


class Told(FakeDispatcher):
    def status(self) -> RouterStatus:
        return STATUS.router


@pytest.fixture
def tier() -> Iterator[Server]:
    deps = gateway_deps(Told(), api_keys={KEY: 0}, notices=lambda: STATUS.notices, gpus=lambda: STATUS.gpus)
    with serving(deps) as server:
        yield server


def invoke(*words: str, key: str = KEY) -> str:
    result = CliRunner().invoke(cli.app, ["status", *words], env={"OVERSPILL_API_KEY": key, "COLUMNS": "80"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def drawn(status: TierStatus, columns: int = 80) -> list[str]:
    console = Console(width=columns, color_system=None)
    with console.capture() as shown:
        console.print(tier_as_table(status, "http://127.0.0.1:8700"))
    return shown.get().splitlines()


def test_a_running_tier_is_shown(tier: Server) -> None:
    shown = " ".join(invoke("--url", tier.url).split())
    assert f"cloud tier at {tier.url}: ready" in shown
    assert "1011 waiting (12 in the tier's queue), 1024 running, 0 in the gateway; overloaded" in shown
    assert "notice: the disk is full" in shown
    assert "torch 2.13.0 on cuda (NVIDIA H100); version sha256:0123456789ab" in shown
    assert "0123456789abc" not in shown
    assert "unavailable: unreachable: no answer to a probe within 3 s, back in 1 min 5 s" in shown


def test_as_json_it_is_what_the_tier_told(tier: Server) -> None:
    told = msgspec.convert(json.loads(invoke("--url", tier.url, "--json")), TierStatus)
    assert (told.router, told.gpus, told.ready) == (STATUS.router, STATUS.gpus, True)
    assert decode(encode(STATUS)) == STATUS


def test_80_columns_cut_nothing() -> None:
    lines = drawn(STATUS)
    assert max(map(len, lines)) <= 80
    whole = "".join("".join(lines).split())
    for cell in (
        "12", "torch", "1024/1024", "999", "100%", "closed", "half_open", "12x61.2s", "breaker:noanswer", "80.0",
        "70.0/80.0", "700", "71", "helddown:powercap", "0:1H100MIG1g.10gb", "alltold1024running,999queued,4.2sago",
    ):  # fmt: skip
        assert cell in whole, cell
    for name in (ENGINE.replica, ABOVE.replica, "0 NVIDIA H100 80GB HBM3"):
        assert any(name in line for line in lines), "a name is whole, to be read and copied"
    assert "…" not in whole
    assert not any(line.rstrip().endswith("...") for line in lines)


def test_without_replicas_or_gpus_that_is_said() -> None:
    empty = msgspec.structs.replace(
        STATUS,
        ready=False,
        why="starting",
        router=msgspec.structs.replace(STATUS.router, replicas=()),
        gpus=GpuReadings(why_none="nvidia-ml-py is not installed: pip install …"),
    )
    shown = " ".join(drawn(empty))
    assert "not ready (starting)" in shown
    assert "no replica is known yet" in shown
    told = "backend away: not reached yet, so what it serves is not known; connection refused"
    lost = msgspec.structs.replace(STATUS, router=msgspec.structs.replace(STATUS.router, unreached=(told,)))
    assert told in " ".join(" ".join(drawn(lost)).split()), "a wrong URL is seen where the others are"
    assert "GPUs: no figures: nvidia-ml-py is not installed" in shown


@pytest.mark.parametrize(("key", "said"), [("wrong" * 6, "is none of its own"), ("", "put the key of the caller into")])
def test_a_wrong_key_is_said(tier: Server, key: str, said: str) -> None:
    with pytest.raises(Unauthenticated, match=said):
        invoke("--url", tier.url, key=key)


def test_a_tier_that_is_away_is_said() -> None:
    with refused_port() as port, pytest.raises(ReplicaUnreachable, match=r"no tier answers at .* is it running"):
        invoke("--url", f"http://127.0.0.1:{port}")


def test_a_certificate_of_a_private_authority_is_no_tier_that_is_away() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_shake_hands, args=(listening, context))
        thread.start()
        with pytest.raises(ReplicaUnreachable, match=r"not trusted here .* --ca-file"):
            invoke("--url", f"https://127.0.0.1:{listening.getsockname()[1]}")
        thread.join()


def _shake_hands(listening: socket.socket, context: ssl.SSLContext) -> None:
    connection, _ = listening.accept()
    with connection, contextlib.suppress(OSError):
        context.wrap_socket(connection, server_side=True).close()


@pytest.mark.parametrize("body", [b"{}", b"\xff", b"[" * 100_000])
def test_what_is_no_overspill_is_said(tier: Server, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.gateway.ops_routes.encode", lambda _: body)
    with pytest.raises(ReplicaUnreachable, match="is no tier of Overspill"):
        invoke("--url", tier.url)
    with pytest.raises(ReplicaUnreachable, match="is no tier of Overspill"):
        invoke("--url", f"{tier.url}/elsewhere")


def test_a_url_that_is_none_is_refused_and_its_secret_is_not_told() -> None:
    with pytest.raises(ConfigError, match="expected the base URL") as refused:
        invoke("--url", "http://me:secret@host")
    assert "secret" not in refused.value.message


def test_watching_goes_on_while_the_tier_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    answers: list[TierStatus | OverspillError] = [STATUS, ReplicaUnreachable("no tier answers"), STATUS]
    pauses: list[float] = []

    def ask(_: object) -> TierStatus:
        answer = answers.pop(0)
        if isinstance(answer, OverspillError):
            raise answer
        return answer

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if not answers:
            raise KeyboardInterrupt

    monkeypatch.setattr(watching, "ask", ask)
    monkeypatch.setattr(time, "sleep", sleep)
    invoke_with = TierAddress("http://127.0.0.1:1")
    watching.watch(invoke_with, 0.5, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("away", "there") for line in lines] == ["there", "no tier answers", "there"]
    assert pauses == [0.5] * 3
    answers[:] = [STATUS, ReplicaUnreachable("no tier answers"), STATUS]
    watching.watch(invoke_with, 0.5, as_json=False)
    assert "1024 running" in capsys.readouterr().out


def test_durations_are_told_in_the_units_that_matter() -> None:
    assert [lasted(s) for s in (0.04, 9.96, 59.0, 61.0, 7325.0, 200_000.0)] == [
        "0.0 s", "10.0 s", "59 s", "1 min 1 s", "2 h 2 min", "2 d 7 h"
    ]  # fmt: skip
