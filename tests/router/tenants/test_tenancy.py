"""Tenants of a whole gateway: limits, roles, models, certificates, reloads, usage that survives."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from router.base.clock import MonotonicClock
from router.base.errors import ConfigError
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.records.telemetry import Telemetry
from router.gateway.app import create_app
from router.tenants.certificate import certificate_digest
from router.tenants.database import UsageDatabase
from router.tenants.directory import Directory
from router.tenants.keys_edit import NewKey, add_key, revoke, set_limits
from router.tenants.ledger import Ledger
from router.tenants.settings import TenantSettings
from router.tenants.tenancy import KeySources, Tenancy
from router.tenants.tenant import Role
from router.tenants.used import Counts
from router.values.replica import Replica
from router.values.settings import RouterSettings
from router.values.usage import Usage
from tests.support.gateway_fakes import FAMILY, gateway_deps, replica_info
from tests.support.tiers import Reciter
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
BODY = {"model": FAMILY, "messages": [{"role": "user", "content": "recite now"}]}
NOVEMBER = 1_795_312_800.0  # 2026-11-22T02:00:00Z
DER = b"not really a certificate, and hashed like one"


class House:
    """A gateway with tenants, over a real dispatcher and a replica that recites ten words, and others beside it."""

    def __init__(
        self,
        path: Path,
        settings: TenantSettings | None = None,
        ledger: Ledger | None = None,
        beside: Sequence[Replica] = (),
    ) -> None:
        self.path = path
        self.clock = MonotonicClock()
        self.reciter = Reciter(replica_info("tiny-int8"))
        self.replicas = [self.reciter, *beside]
        self.telemetry = Telemetry()
        self.dispatcher = Dispatcher(self.replicas, RouterSettings(), clock=self.clock, telemetry=self.telemetry)
        directory = KeySources(path=path).directory()
        self.tenancy = Tenancy(directory, self.clock, ledger=ledger, settings=settings)
        self.tenancy.watch(self.telemetry.registry)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[House]:
        deps = gateway_deps(
            self.dispatcher,
            telemetry=self.telemetry,
            clock=self.clock,
            tenancy=self.tenancy,
            models=lambda: [replica.info for replica in self.replicas],
        )
        transport = httpx.ASGITransport(create_app(deps), client=("10.0.0.5", 5), raise_app_exceptions=False)
        async with self.tenancy, self.dispatcher, httpx.AsyncClient(transport=transport, base_url="http://a") as http:
            self.http = http
            yield self

    async def ask(self, key: str, **headers: str) -> httpx.Response:
        return await self.http.post(CHAT, json=BODY, headers={"authorization": f"Bearer {key}", **headers})

    async def get(self, path: str, key: str) -> httpx.Response:
        return await self.http.get(path, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


# ── limits ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_what_is_left_is_told_with_every_reply_as_openai_tells_it(keys: Path) -> None:
    key = add_key(keys, NewKey("acme"), {"requests_per_minute": 2, "tokens_per_minute": 1000})
    async with House(keys).open() as house:
        first, second, third = [await house.ask(key) for _ in range(3)]
    assert [reply.status_code for reply in (first, second, third)] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert [r.headers["x-ratelimit-remaining-requests"] for r in (first, second, third)] == ["1", "0", "0"]
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 1000
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert (third.json()["error"]["code"], third.json()["error"]["type"]) == ("rate_limit_exceeded", "requests")
    assert float(third.headers["retry-after-ms"]) <= 30_000


async def test_tokens_are_charged_as_they_were_used(keys: Path) -> None:
    key = add_key(keys, NewKey("acme"), {"tokens_per_minute": 1000})
    async with House(keys).open() as house:
        await house.ask(key)
        quota = house.tenancy.quotas["acme"]
        await until(lambda: quota.running == 0)
        _, tokens = quota.left(house.clock.now_s())
        assert tokens is not None
        assert 1000 - tokens.remaining == 13, "three of the prompt, ten of the answer"
        too_large = await house.http.post(
            CHAT, json={**BODY, "max_tokens": 2000}, headers={"authorization": f"Bearer {key}"}
        )
    assert too_large.status_code == 429
    assert too_large.headers["x-should-retry"] == "false"
    assert "asks for 2003 tokens" in too_large.json()["error"]["message"]


async def test_concurrency_counts_streams_and_gives_back_what_clients_leave(keys: Path) -> None:
    key = add_key(keys, NewKey("acme"), {"concurrency": 1})
    async with House(keys).open() as house:
        house.reciter.pause = asyncio.Event()
        running = asyncio.create_task(house.ask(key))
        await until(lambda: house.tenancy.quotas and house.tenancy.quotas["acme"].running == 1)
        assert (await house.ask(key)).json()["error"]["type"] == "concurrency"
        house.reciter.pause.set()
        assert (await running).status_code == 200
        assert (await house.ask(key)).status_code == 200


async def test_a_spent_budget_is_told_in_openais_words_and_survives_a_restart(keys: Path, tmp_path: Path) -> None:
    key = add_key(keys, NewKey("acme"), {"monthly_tokens": 12})
    for expected in (200, 429):
        ledger = Ledger(UsageDatabase(str(tmp_path / "usage.db")), MonotonicClock(), lambda: NOVEMBER)
        async with House(keys, ledger=ledger).open() as house:
            reply = await house.ask(key)
        assert reply.status_code == expected
    assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == ("insufficient_quota",) * 2
    assert reply.headers["x-should-retry"] == "false"
    assert ledger.month_ends_s() == 8 * 86_400 + 22 * 3600, "until December begins"


# ── who sees what ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_decisions_and_usage_are_told_to_their_own_tenant_and_to_the_operator(keys: Path) -> None:
    alice, bob = (add_key(keys, NewKey(name), {}) for name in ("alice", "bob"))
    second = add_key(keys, NewKey("alice", "bench-1"), {})
    operator = add_key(keys, NewKey("ops", role=Role.OPERATOR), {})
    async with House(keys).open() as house:
        await house.ask(alice, **{"x-request-id": "r1"})
        statuses = [(await house.get("/v1/decisions/r1", key)).status_code for key in (alice, second, bob, operator)]
        assert statuses == [200, 200, 404, 200]
        await until(lambda: house.tenancy.quotas["alice"].running == 0)
        pages = [(await house.get("/v1/usage", key)).json()["rows"] for key in (alice, bob, operator)]
    seen = [[row["key"]["tenant"] for row in page] for page in pages]
    assert seen == [["alice"], [], ["alice"]]


async def test_pages_about_everybody_are_for_operators_and_monitors(keys: Path) -> None:
    caller, monitor, operator = (add_key(keys, NewKey(f"t-{role.value}", role=role), {}) for role in Role)
    _put(keys, _put(keys, b"") + b"a-key-of-an-earlier-release\n")
    async with House(keys).open() as house:
        for path in ("/metrics", "/v1/status"):
            keys_of = (caller, monitor, operator, "a-key-of-an-earlier-release")
            replies = [await house.get(path, key) for key in keys_of]
            assert [reply.status_code for reply in replies] == [403, 200, 200, 200]
            assert "role `monitor` or `operator`" in replies[0].json()["error"]["message"]


async def test_models_that_are_not_a_tenants_are_not_there_for_it(keys: Path) -> None:
    mine = add_key(keys, NewKey("mine"), {"models": ("tiny-int8",)})
    others = add_key(keys, NewKey("others"), {"models": ("large*",)})
    async with House(keys).open() as house:
        listed = [
            [card["id"] for card in (await house.get("/v1/models", key)).json()["data"]] for key in (mine, others)
        ]
        assert listed == [["tiny-int8"], []]
        hidden = await house.ask(others)
        shown = await house.get("/v2/models/tiny-int8", others)
        one = await house.get("/v1/models/tiny-int8", others)
        pinned = await house.http.post(
            CHAT, json={**BODY, "model": "tiny-int8"}, headers={"authorization": f"Bearer {mine}"}
        )
    assert [reply.status_code for reply in (hidden, shown, one, pinned)] == [404, 404, 404, 200]
    for reply in (hidden, shown, one):
        assert "tiny-int8, " not in reply.text
        assert "none yet" not in reply.text
        assert "may use `large*`, and no such model is served here" in reply.text


async def test_probes_tell_load_to_those_let_in_and_of_models_what_they_may_see(keys: Path) -> None:
    mine = add_key(keys, NewKey("mine"), {"models": ("tiny-int8",)})
    others = add_key(keys, NewKey("others"), {"models": ("large*",)})
    async with House(keys).open() as house:
        told = [(await house.get("/health/ready", key)).headers["endpoint-load-metrics"] for key in (mine, others, "?")]
        anonymous = await house.http.get("/health/ready")
    assert ["tiny-int8" in line for line in told] == [True, False, False]
    assert anonymous.status_code == 200
    assert "tiny-int8" not in anonymous.headers["endpoint-load-metrics"]


async def test_a_decision_tells_of_no_model_that_is_not_its_tenants(keys: Path) -> None:
    operator = add_key(keys, NewKey("ops", role=Role.OPERATOR), {})
    mine = add_key(keys, NewKey("mine"), {"models": (FAMILY,)})
    async with House(keys).open() as house:
        await house.ask(mine, **{"x-request-id": "r1"})
        own, all_of_it = [(await house.get("/v1/decisions/r1", key)).json() for key in (mine, operator)]
    assert (len(own.get("candidates", ())), len(all_of_it["candidates"])) == (0, 1)


async def test_a_decision_tells_its_tenant_no_address_of_a_server(keys: Path) -> None:
    mine, monitor = (add_key(keys, NewKey(role.value, role=role), {}) for role in (Role.CALLER, Role.MONITOR))
    house = House(keys)
    house.reciter.info = dataclasses.replace(
        house.reciter.info, replica_id="pod@10.0.0.7:8000/tiny-int8", endpoint="http://10.0.0.7:8000", backend="pod"
    )
    house.dispatcher.set_replicas([house.reciter])
    async with house.open():
        pages = []
        for key in (mine, monitor):
            await house.ask(key, **{"x-request-id": "r1"})
            pages.append(await house.get("/v1/decisions/r1", key))
    own, all_of_it = (page.json() for page in pages)
    assert "10.0.0.7" not in pages[0].text
    assert {own["chosen"]["replica"], own["events"][0]["replica"], own["candidates"][0]["replica"]} == {"pod/tiny-int8"}
    assert all_of_it["candidates"][0]["endpoint"] == "http://10.0.0.7:8000"


# ── changes while it runs ───────────────────────────────────────────────────────────────────────────────────────────


def _put(path: Path, content: bytes) -> bytes:
    """Write a file; return what it held."""
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(content)
    return before


def _remove(path: Path) -> None:
    path.unlink()


def _shut(path: Path) -> None:
    path.chmod(0)


async def test_keys_come_and_go_without_a_restart_and_a_broken_file_changes_nothing(keys: Path) -> None:
    first = add_key(keys, NewKey("acme"), {})
    async with House(keys).open() as house:
        directory = house.tenancy.directory
        second = add_key(keys, NewKey("acme"), {"concurrency": 3})
        await directory.refresh(keys)
        assert (await house.ask(second)).status_code == 200
        assert directory.tenants["acme"].limits.concurrency == 3
        good = _put(keys, b"nonsense\n")
        await directory.refresh(keys)
        assert directory.fault
        assert (await house.ask(first)).status_code == 200, "those read before stay in force"
        assert any("keys not reloaded" in notice for notice in house.tenancy.notices())
        _remove(keys)
        await directory.refresh(keys)
        assert (await house.ask(first)).status_code == 200
        _put(keys, good)
        revoke(keys, "acme")
        await directory.refresh(keys)
        assert not directory.fault
        assert (await house.ask(first)).status_code == 401


@pytest.mark.parametrize("left", [b"", b"\n \t\r\n", b"\0" * 300], ids=["nothing", "blanks", "zeros of a lost block"])
async def test_an_emptied_file_locks_nobody_out_and_is_told(keys: Path, left: bytes) -> None:
    key = add_key(keys, NewKey("acme"), {})
    async with House(keys).open() as house:
        directory = house.tenancy.directory
        good = _put(keys, left)
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                directory.ask()  # a signal asks to read it again, and changes nothing about what it says
                await directory.refresh(keys)
        assert [(log["log_level"], "is empty" in log["why"]) for log in logs] == [("error", True)], "told once"
        assert (await house.ask(key)).status_code == 200, "those read before stay in force"
        assert any("keys not reloaded" in notice and "is empty" in notice for notice in house.tenancy.notices())
        fault = house.telemetry.registry.get_sample_value("overspill_tenant_keys_fault")
        assert fault == 1.0
        _put(keys, good)
        await directory.refresh(keys)
        assert (directory.fault, (await house.ask(key)).status_code) == ("", 200)


@pytest.mark.parametrize("way", ["revoke", "a comment is left", "a tenant is left"])
async def test_the_last_key_can_be_taken_away(keys: Path, way: str) -> None:
    key = add_key(keys, NewKey("acme"), {"concurrency": 3} if way == "a tenant is left" else {})
    async with House(keys).open() as house:
        directory = house.tenancy.directory
        if way == "a comment is left":
            _put(keys, b"# " + _put(keys, b""))
        else:
            revoke(keys, "acme")
        await directory.refresh(keys)
        assert (directory.fault, (await house.ask(key)).status_code) == ("", 401)
        assert any("nobody is let in" in notice for notice in house.tenancy.notices())
        again = add_key(keys, NewKey("acme"), {})
        await directory.refresh(keys)
        assert (await house.ask(again)).status_code == 200
        assert b"no keys" not in _put(keys, b"")


async def test_a_file_that_is_empty_at_the_start_lets_nobody_in_until_it_gets_a_key(keys: Path) -> None:
    _put(keys, b"")
    async with House(keys).open() as house:
        assert (await house.ask("x" * 32)).status_code == 401
        assert any("nobody is let in" in notice for notice in house.tenancy.notices())
        key = add_key(keys, NewKey("acme"), {})
        await house.tenancy.directory.refresh(keys)
        assert (await house.ask(key)).status_code == 200
        assert not any("nobody is let in" in notice for notice in house.tenancy.notices())


async def test_a_file_that_may_not_be_read_any_more_is_told_before_a_restart_needs_it(keys: Path) -> None:
    add_key(keys, NewKey("acme"), {})
    directory = Directory(path=keys)
    directory.load()
    before = directory.reloads
    _shut(keys)
    await directory.refresh(keys)
    if os.geteuid() == 0:  # who may read everything
        assert directory.reloads > before
    else:
        assert "Permission denied" in directory.fault


async def test_a_change_is_seen_by_itself_and_a_signal_is_quicker(keys: Path) -> None:
    add_key(keys, NewKey("acme"), {})
    directory = Directory(path=keys)
    directory.load()
    watching = asyncio.create_task(directory.watch(MonotonicClock()))
    try:
        set_limits(keys, "acme", {"concurrency": 7})
        await until(lambda: directory.tenants["acme"].limits.concurrency == 7)
        before = directory.reloads
        directory.ask()
        await until(lambda: directory.reloads > before)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_a_file_that_is_missing_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*overspill cloud keys add NAME --file "):
        KeySources(path=tmp_path / "none").directory()


# ── devices ─────────────────────────────────────────────────────────────────────────────────────────────────────────

PEM = "-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(DER).decode() + "-----END CERTIFICATE-----\n"
FINGERPRINT = hashlib.sha256(DER).hexdigest()


@pytest.mark.parametrize(
    "told",
    [
        FINGERPRINT.upper(),
        ":".join(FINGERPRINT[i : i + 2] for i in range(0, 64, 2)),
        f":{base64.b64encode(DER).decode()}:",
        quote(PEM),
        f'By=spiffe://x;Hash={"0" * 64};Subject="",By=y;Hash={FINGERPRINT};URI=z',
    ],
)
def test_a_certificate_is_one_however_a_proxy_spells_it(told: str) -> None:
    assert certificate_digest(told) == FINGERPRINT


@given(st.text(max_size=200))
def test_what_is_no_certificate_opens_nothing(told: str) -> None:
    digest = certificate_digest(told)
    assert digest is None or len(digest) == 64


async def test_a_certificate_lets_a_device_in_where_the_proxy_is_trusted(keys: Path) -> None:
    add_key(keys, NewKey("fleet", "bench-2", certificate=FINGERPRINT), {})
    header = {"client-cert": f":{base64.b64encode(DER).decode()}:"}
    for proxies, header_name, expected in (
        (("10.0.0.0/24",), "client-cert", 200),
        (("10.0.9.9",), "client-cert", 401),
        ((), "off", 401),
    ):
        settings = TenantSettings(client_certificates=header_name, trusted_proxies=proxies)  # type: ignore[arg-type]
        async with House(keys, settings).open() as house:
            reply = await house.http.post(CHAT, json=BODY, headers=header)
            assert reply.status_code == expected
            if expected == 200:
                await until(lambda house=house: house.tenancy.ledger.totals)
                rows = await house.tenancy.ledger.report("2000-01-01", "2999-01-01")
                assert [(row.key.tenant, row.key.device) for row in rows] == [("fleet", "bench-2")]


def test_certificates_are_believed_from_named_proxies_alone() -> None:
    with pytest.raises(ValueError, match="would believe anybody"):
        TenantSettings(client_certificates="client-cert")
    with pytest.raises(ValueError, match="no address or network"):
        TenantSettings(trusted_proxies=("proxy.example",))


# ── usage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _ledger(path: Path, wall: list[float]) -> Ledger:
    return Ledger(UsageDatabase(str(path)), MonotonicClock(), lambda: wall[0])


async def test_usage_adds_up_over_days_restarts_and_tiers(tmp_path: Path) -> None:
    wall, path = [NOVEMBER], tmp_path / "usage.db"
    async with _ledger(path, wall) as one, _ledger(path, wall) as other:
        for ledger in (one, other, one):
            ledger.add("acme", "", "tiny", Usage(10, 5, 3))
        await one.write()
        await other.write()
        await one.write()
        assert (one.spent("acme"), other.spent("acme")) == (45, 45), "tiers that share a database share a budget"
        wall[0] += 86_400
        one.add("acme", "bench-1", "tiny", Usage(1, 1))
    async with _ledger(path, wall) as again:
        rows = await again.report("2026-11-22", "2026-11-22")
        assert [(row.key.day, row.counts) for row in rows] == [("2026-11-22", Counts(3, 30, 9, 15))]
        assert len(await again.report("2026-11-01", "2026-11-30")) == 2
        assert again.spent("acme") == 47
        wall[0] += 30 * 86_400
        assert again.spent("acme") == 0, "another month"


async def test_a_database_that_is_away_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, database = [NOVEMBER], UsageDatabase(str(tmp_path / "usage.db"))
    ledger = Ledger(database, MonotonicClock(), lambda: wall[0])

    def away(*_: Any) -> Any:
        raise OSError("no such disk")

    async with ledger:
        ledger.add("acme", "", "tiny", Usage(1, 2))
        with monkeypatch.context() as patch:
            patch.setattr(database, "exchange", away)
            await ledger.write()
            assert "no such disk" in ledger.fault
            ledger.add("acme", "", "tiny", Usage(1, 2))
            assert ledger.spent("acme") == 6
        await ledger.write()
        assert (ledger.fault, ledger.unwritten, ledger.spent("acme")) == ("", 0, 6)


async def test_one_thread_at_a_time_asks_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report asks while usage is being written, and the end comes while it still is."""
    database, inside, most = UsageDatabase(str(tmp_path / "usage.db")), list[str](), list[int]()

    def watched(name: str) -> None:
        real = getattr(database, name)

        def call(*given: Any) -> Any:
            inside.append(name)
            most.append(len(inside))
            time.sleep(0.05)
            try:
                return real(*given)
            finally:
                inside.remove(name)

        monkeypatch.setattr(database, name, call)

    for name in ("open", "close", "exchange", "rows"):
        watched(name)
    async with Ledger(database, MonotonicClock(), lambda: NOVEMBER) as ledger:
        ledger.add("acme", "", "tiny", Usage(1, 2))
        writing = asyncio.create_task(ledger.write())
        rows = await ledger.report("2026-11-01", "2026-11-30")
        assert [row.counts.completion_tokens for row in rows] == [2]
        await writing
        cut = asyncio.create_task(ledger.write())
        await until(lambda: inside)
        cut.cancel()
    assert max(most) == 1


async def test_who_leaves_while_its_report_waits_takes_no_usage_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a report was to write first waits behind another call; whoever asked for the report is gone by then."""
    database, free = UsageDatabase(str(tmp_path / "usage.db")), threading.Event()
    rows = database.rows

    def slow(since: str, until: str) -> Any:
        free.wait(10)
        return rows(since, until)

    async with Ledger(database, MonotonicClock(), lambda: NOVEMBER) as ledger:
        monkeypatch.setattr(database, "rows", slow)
        first = asyncio.create_task(ledger.report("2026-11-01", "2026-11-30"))
        await asyncio.sleep(0.1)
        ledger.add("acme", "", "tiny", Usage(1, 2))
        left = asyncio.create_task(ledger.report("2026-11-01", "2026-11-30"))
        await asyncio.sleep(0.1)
        left.cancel()
        free.set()
        await asyncio.gather(first, left, return_exceptions=True)
        [row] = await ledger.report("2026-11-01", "2026-11-30")
        assert row.counts.completion_tokens == 2


def test_a_database_that_cannot_be_used_is_named_without_its_password(tmp_path: Path) -> None:
    for url in (str(tmp_path / "none" / "usage.db"), "nonsense://u:hunter2@host/x"):
        with pytest.raises(ConfigError, match=r"tenants\.database") as raised:
            UsageDatabase(url).open()
        assert "hunter2" not in raised.value.message


async def test_answers_that_break_off_or_lose_their_reader_are_counted_as_far_as_they_came(keys: Path) -> None:
    key = add_key(keys, NewKey("acme"), {})
    async with House(keys).open() as house:
        house.reciter.pause = asyncio.Event()
        running = asyncio.create_task(house.ask(key))
        await until(lambda: house.reciter.requests)
        asked, digest = house.reciter.requests[0].request_id, house.tenancy.directory.tenants["acme"].digest
        await until(lambda: house.dispatcher.decision(asked, digest).ttft_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: house.tenancy.ledger.totals)
        counts = house.tenancy.ledger.totals["acme", "tiny-int8"]
        assert counts.requests == 1
        assert 1 <= counts.completion_tokens <= 3


async def test_the_metrics_of_many_tenants_are_bounded(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    operator = add_key(keys, NewKey("ops", role=Role.MONITOR), {})
    async with House(keys).open() as house:
        for number in range(700):
            house.tenancy.ledger.add(f"t{number}", "", "tiny", Usage(1, 1))
        page = (await house.get("/metrics", operator)).text
    lines = [line for line in page.splitlines() if line.startswith("overspill_tenant_tokens_total{")]
    assert len(lines) == 3 * 501
    assert 'overspill_tenant_tokens_total{kind="prompt",model="tiny",tenant="(others)"} 200.0' in lines


# ── retries ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_retries_beyond_the_budget_go_first_while_others_wait(keys: Path) -> None:
    key = add_key(keys, NewKey("acme"), {})
    async with House(keys).open() as house:
        again = {"x-stainless-retry-count": "1"}
        assert [(await house.ask(key, **again)).status_code for _ in range(6)] == [200] * 6, "nobody waits"
        house.reciter.pause = asyncio.Event()
        running = [asyncio.create_task(house.ask(key)) for _ in range(8)]
        await until(lambda: house.dispatcher.waiting)
        turned_away = await house.ask(key, **again)
        house.reciter.pause.set()
        assert {reply.status_code for reply in await asyncio.gather(*running)} == {200}
    assert turned_away.status_code == 429
    assert turned_away.json()["error"]["type"] == "retries"
    assert 4.0 <= float(turned_away.headers["retry-after-ms"]) / 1000 <= 8.0
