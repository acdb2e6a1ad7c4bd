"""Five lines that tell a person why, from a file or from a running tier, and errors that say what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from overspill import app
from router.client.tier import KEY_VARIABLE
from router.decisions.explain import five_lines
from router.decisions.line import AskedFor, CandidateRow, ChosenRow, Decision, encode
from router.decisions.pseudonyms import Pseudonyms
from tests.support.gateway_fakes import gateway_deps, serving
from tests.support.ports import unused_port
from tests.support.router_fakes import request, world


def run(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["explain", *words], env={KEY_VARIABLE: "", **variables}, catch_exceptions=True)


def story(lines: list[str]) -> dict[str, str]:
    told = dict(line.split(maxsplit=1) for line in lines)
    assert list(told) == ["asked", "went", "instead", "predicted", "ended"]
    return told


async def test_a_request_that_was_served() -> None:
    async with world() as w:
        ask = request(w.clock, prompt_tokens=1312, max_tokens=24, deadline_s=3.0, ttft_s=1.5, priority=2)
        await w.clock.run(w.read(ask))
        decision = w.dispatcher.explain(ask.request_id)
    told = story(five_lines(decision))
    assert told["asked"] == (
        "tiny, prompt of 1,312 tokens, answer: at most 24 tokens; first token within 1,500 ms, "
        "all of it within 3,000 ms; priority 2"
    )
    assert told["went"].startswith("to http://cloud:8700/tiny-fp32: ")
    assert f"({decision.chosen.reason}); its whole promise was 9" in told["went"]
    assert told["went"].endswith("% likely to be kept there")
    other = next(row for row in decision.candidates if row.replica in told["instead"])
    assert not other.chosen
    assert other.why in told["instead"]
    assert told["predicted"].startswith("first token in ")
    assert "it took" in told["predicted"]
    assert told["ended"].startswith("completed after ")
    assert told["ended"].endswith("kept ttft, deadline")


async def test_a_request_that_was_refused() -> None:
    async with world(remote=False, max_queue=1) as w:
        w.dispatcher.set_replicas([w.local])
        asks = [request(w.clock, max_tokens=24, ttft_s=9.0) for _ in range(6)]
        work = [asyncio.ensure_future(w.read(ask)) for ask in asks]
        await w.clock.run(asyncio.gather(*work, return_exceptions=True))
        found = [w.dispatcher.explain(ask.request_id) for ask in asks]
        told = story(five_lines(next(decision for decision in found if decision.refused)))
    assert told["went"].startswith("nowhere: the queue is full")
    assert "(shed)" in told["ended"] or "(evicted)" in told["ended"]
    assert "come back in " in told["ended"]
    assert "missed ttft" in told["ended"]


async def test_a_deadline_that_no_replica_can_keep() -> None:
    async with world() as w:
        ask = request(w.clock, prompt_tokens=1500, deadline_s=0.01)
        with pytest.raises(Exception, match="promise cannot be kept"):
            await w.clock.run(w.read(ask))
        told = story(five_lines(w.dispatcher.explain(ask.request_id)))
    assert "nowhere" in told["went"]
    assert "quality" in told["instead"], "the soonest of all is told"
    assert told["predicted"] == "nothing: no replica was chosen"
    assert "a retry cannot keep this deadline" in told["ended"]


async def test_nobody_could() -> None:
    async with world() as w:
        for replica in w.all:
            replica.available = False
        ask = request(w.clock)
        with pytest.raises(Exception, match="no replica can take"):
            await w.clock.run(w.read(ask))
        told = story(five_lines(w.dispatcher.explain(ask.request_id)))
    assert told["instead"].startswith("nobody: local/tiny-int8 could not take requests; ")
    assert told["instead"].endswith(", and 1 more")


async def test_a_failover_and_a_request_that_still_runs() -> None:
    async with world() as w:
        w.local.faults.append("unreachable")
        ask = request(w.clock, max_tokens=4, locality="local-only", model="tiny")
        await w.clock.run(w.read(ask))
        told = story(five_lines(w.dispatcher.explain(ask.request_id)))
        assert "after local/tiny-int8 failed" in told["went"]
        running = request(w.clock, max_tokens=4)
        answer = await w.clock.run(w.dispatcher.start(running))
        assert story(five_lines(w.dispatcher.explain(running.request_id)))["ended"].startswith("not yet")
        await answer.chunks.aclose()


async def test_the_only_replica_failed() -> None:
    async with world() as w:
        w.local.faults.append(("break", 2))
        w.dispatcher.set_replicas([w.local])
        ask = request(w.clock, max_tokens=8)
        with pytest.raises(Exception, match="broke off"):
            await w.clock.run(w.read(ask))
        told = story(five_lines(w.dispatcher.explain(ask.request_id)))
    assert told["went"].startswith("to local/tiny-int8, which failed: ")


def test_a_cut_answer_says_so() -> None:
    row = CandidateRow(
        replica="local/a", tier="edge", variant="a", quality=1.0, chosen=True, ttft_ms=1.0, finish_ms=2.0
    )
    decision = Decision(
        request_id="r",
        model="m",
        prompt_tokens=1,
        policy="p",
        objective=AskedFor(deadline_ms=12_000.0),
        candidates=(row,),
        chosen=ChosenRow(replica="local/a", tier="edge", variant="a", rung=0, reason="late", why="w", degraded=True),
        events=({"at_ms": 40.0, "event": "sent", "replica": "local/a"},),
        outcome="degraded",
        finish_ms=12_000.0,
        cut=True,
        kept={"deadline": True},
    )
    told = story(five_lines(decision))
    assert told["asked"] == "m, prompt of 1 token, answer: no cap; all of it within 12.0 s"
    assert told["went"] == "to local/a after waiting 40 ms: w (late)"
    assert told["instead"] == "nobody else serves this model"
    assert told["ended"] == "degraded after 12.0 s; cut by a cap or the deadline; kept deadline"


async def test_the_command_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with world() as w:
        ask = request(w.clock, request_id="alice/7", max_tokens=4)
        await w.clock.run(w.read(ask))
        line = encode(Pseudonyms.open(path).hide(w.dispatcher.explain(ask.request_id)))
        path.write_bytes(line + b'{"torn')
    shown = run("alice/7", "--file", str(path))
    assert shown.exit_code == 0
    assert len(shown.output.splitlines()) == 5
    story(shown.output.splitlines())
    whole = run("alice/7", "--file", str(path), "--json")
    assert '"request_id": "h-' in whole.output
    unknown = run("alice/8", "--file", str(path))
    assert unknown.exception.message.startswith(f"{path} and its older files hold no request 'alice/8' (1 lines, 1")
    assert "no decision file" in run("x", "--file", str(tmp_path / "none")).exception.message
    assert "either --file or --url" in run("x", "--file", str(path), "--url", "http://127.0.0.1:1").exception.message


async def test_no_terminal_obeys_what_a_server_said(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    async with world() as w:
        ask = request(w.clock, request_id="r-1", max_tokens=4)
        await w.clock.run(w.read(ask))
        found = w.dispatcher.explain(ask.request_id)
    said = "\x1b]0;owned\x07\x1b[2J\x9b31mevil"
    path.write_bytes(encode(msgspec.structs.replace(found, request_id="r-1", model=said, error=said)))
    Pseudonyms.open(path)
    for more in ((), ("--json",)):
        shown = run("r-1", "--file", str(path), *more)
        assert shown.exit_code == 0
        assert "evil" in shown.output
        assert not {"\x1b", "\x07", "\x9b"} & {*shown.output}


async def test_the_command_asks_a_running_tier() -> None:
    async with world() as w:
        for caller in ("", "7" * 64):
            ask = request(w.clock, request_id="job/7", max_tokens=4, caller=caller)
            await w.clock.run(w.read(ask))
        with serving(gateway_deps(w.dispatcher)) as server:
            shown = await asyncio.to_thread(run, "job/7", "--url", server.url)
            unknown = await asyncio.to_thread(run, "job/8", "--url", server.url)
        assert story(shown.output.splitlines())["asked"].startswith("tiny, prompt of 50 tokens")
        assert f"{server.url} keeps no decision for 'job/8'" in unknown.exception.message
        with serving(gateway_deps(w.dispatcher, api_keys={"a-key-of-this-tier": 0})) as server:
            nobody = await asyncio.to_thread(run, "job/7", "--url", server.url)
            wrong = await asyncio.to_thread(lambda: run("job/7", "--url", server.url, **{KEY_VARIABLE: "another"}))
            others = await asyncio.to_thread(
                lambda: run("job/7", "--url", server.url, **{KEY_VARIABLE: "a-key-of-this-tier"})
            )
    assert f"put the key of the caller into ${KEY_VARIABLE}" in nobody.exception.message
    assert "is none of its own" in wrong.exception.message
    assert "to the key that sent the request" in others.exception.message, "another caller's request of that id"


def test_no_tier_or_no_address_is_a_clear_error() -> None:
    message = run("x", "--url", f"http://127.0.0.1:{unused_port()}").exception.message
    assert "is it running" in message
    for url in ("127.0.0.1:8600", "http://u:p@host", "ftp://host"):
        message = run("x", "--url", url).exception.message
        assert "expected the base URL of a tier" in message
        assert "u:p" not in message
