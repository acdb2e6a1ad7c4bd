"""Run real clients against real servers, and write `docs/compatibility.md`.

    make compatibility [CLIENTS="NAME …"] [SERVERS="NAME …"]
    python -m benchmarks compatibility -- [--clients NAME …] [--servers NAME …] [--checks WORD …] [--no-page]
    python -m benchmarks compatibility -- --page | --list

Each client is installed, as it was published, into an environment of its own under `.overspill/compat/` (about 5 GB for
all of them), and its script in `clients/` is run against each server that speaks its protocol. A part replaces its own
rows of the page and keeps the others. The last line tells regressions: what a peer passes and we fail without a reason
in `reasons.toml`; the command ends with status 1 then.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from benchmarks._stamp import commit, machine
from benchmarks.compatibility.client_run import Report, ask
from benchmarks.compatibility.environments import Command, MissingError
from benchmarks.compatibility.outcomes import Check, Run, load, merged, save
from benchmarks.compatibility.page import Page, cells, lines_of, reasons, regressions, stale
from benchmarks.compatibility.registry import CLIENTS, Client
from benchmarks.compatibility.servers import FAMILY, KINDS, Kind, Peers, Place, Running
from benchmarks.live.running import run
from examples.demo.processes import StackError, free_port
from models.store.store import ModelStore

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / ".overspill" / "compat"
PAGE = REPOSITORY / "docs" / "compatibility.md"
RESULTS = REPOSITORY / "benchmarks" / "results" / "compatibility.json"
LIMIT_S = 3 * 3600.0


@dataclass(frozen=True)
class Plan:
    """What is to be run: clients with their commands (or why there is none), servers, words of checks."""

    clients: tuple[tuple[Client, Command | str], ...]
    kinds: tuple[Kind, ...]
    only: tuple[str, ...]


async def measure(plan: Plan, place: Place, keep: Callable[[Run], None]) -> None:
    """Start one server after the other, and run all clients against it.

    Args:
        keep: called with what each client brought, as soon as it is known: an hour's work outlives its interruption.
    """
    async with AsyncExitStack() as stack:
        peers = Peers(place, stack)
        for kind in plan.kinds:
            clients = [(client, command) for client, command in plan.clients if client.speaks in kind.speaks]
            if not clients:
                continue
            print(f"\n── {kind.title} ──", flush=True)
            try:
                async with kind.start(place, peers) as running:
                    for client, command in clients:
                        keep(await _one(client, command, running, place, plan.only))
            except (MissingError, StackError) as error:
                print(f"not run: {error}", flush=True)
                why = " ".join(str(error).split())
                for client, _ in clients:
                    keep(_run(client, kind.name, None, _absent(why)))


async def _one(client: Client, command: Command | str, running: Running, place: Place, only: tuple[str, ...]) -> Run:
    began_s = time.perf_counter()
    server = running.server
    if isinstance(command, str):
        report = _absent(command)
    else:
        server.folder.mkdir(parents=True, exist_ok=True)
        log = place.folder / f"{server.name}-{client.name}.log"
        report = await ask(command, server, log, client.limit_s, only)
    passed = sum(check.outcome == "pass" for check in report.checks)
    print(f"{client.title}: {passed} of {len(report.checks)} in {time.perf_counter() - began_s:.0f} s", flush=True)
    for check in report.checks:
        if check.outcome != "pass":
            print(f"   {check.outcome}: {check.check}: {check.reason}", flush=True)
    return _run(client, server.name, running, report)


def _absent(why: str) -> Report:
    return Report({}, [Check("the client starts", "not run", why)])


def _run(client: Client, server: str, running: Running | None, report: Report) -> Run:
    day = datetime.now(timezone.utc).date().isoformat()
    began, version = (commit(), "") if running is None else (running.commit, running.version)
    return Run(client.name, server, day, began, report.versions, version, report.checks)


def prepared(clients: Sequence[Client]) -> list[tuple[Client, Command | str]]:
    """Install what is not there yet, one run at a time; a client that cannot be had is told as such."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "installing.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return [(client, _prepared(client)) for client in clients]


def _prepared(client: Client) -> Command | str:
    try:
        return client.environment.prepare(FOLDER, client.script)
    except MissingError as error:
        print(f"{client.title}: {error}", flush=True)
        return str(error)


def place() -> Place:
    """Make the folder for logs, and the tokenizer that some clients want to see as the hub lays it out."""
    logs, tokenizer = FOLDER / "run", FOLDER / "tokenizer"
    for folder in (logs, tokenizer):
        folder.mkdir(parents=True, exist_ok=True)
    artifact = ModelStore().artifact_dir(f"{FAMILY}-int8")
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(artifact / name, tokenizer / name)
    told = json.loads((artifact / "tokenizer_config.json").read_text(encoding="utf-8"))
    told["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    (tokenizer / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return Place(logs, tokenizer, free_port())


def all_runs(now: Sequence[Run]) -> list[Run]:
    """Return the kept results with those of now over them."""
    return merged(load(RESULTS), now, [client.name for client in CLIENTS], [kind.name for kind in KINDS])


def written(one: Run) -> None:
    """Write one client's rows into the results, and the page anew."""
    runs = all_runs([one])
    save(RESULTS, runs, {name: str(value) for name, value in machine().items()})
    PAGE.write_text(Page(runs, CLIENTS, KINDS).text(), encoding="utf-8")


def _words(given: Sequence[str]) -> list[str]:
    return [word for one in given for word in one.replace(",", " ").split()]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--servers", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--checks", nargs="*", default=[], metavar="WORD", help="those alone; the page stays as it is")
    parser.add_argument("--no-page", action="store_true", help="write neither the page nor the results")
    parser.add_argument("--page", action="store_true", help="write the page from the results there are; run nothing")
    parser.add_argument("--list", action="store_true", help="name clients and servers")
    wanted = parser.parse_args()
    for kind, given, known in (
        ("client", wanted.clients, [client.name for client in CLIENTS]),
        ("server", wanted.servers, [one.name for one in KINDS]),
    ):
        given[:] = _words(given) or known
        unknown = sorted(set(given) - set(known))
        if unknown:
            parser.error(f"no {kind} {', '.join(unknown)}; there are {', '.join(known)}")
    return wanted


def main() -> int:
    wanted = arguments()
    if wanted.list:
        print("\n".join(f"{client.name:18} {client.title}, {client.speaks}" for client in CLIENTS))
        print("\n".join(f"{kind.name:18} {kind.title}{' (peer)' if kind.peer else ''}" for kind in KINDS))
        return 0
    if wanted.page:
        PAGE.write_text(Page(load(RESULTS), CLIENTS, KINDS).text(), encoding="utf-8")
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    clients = [client for client in CLIENTS if client.name in wanted.clients]
    kinds = tuple(kind for kind in KINDS if kind.name in wanted.servers)
    plan = Plan(tuple(prepared(clients)), kinds, tuple(wanted.checks))
    runs: list[Run] = []

    def keep(one: Run) -> None:
        runs.append(one)
        if not (wanted.no_page or wanted.checks):
            written(one)

    run(measure(plan, place(), keep), LIMIT_S)
    known = reasons()
    found = cells(all_runs(runs), known)
    for reason in stale(found, known):
        print(f"stale reason: {reason}")
    lost = lines_of(regressions(found, KINDS))
    print(f"\nregressions: {'; '.join(lost) if lost else 'none'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
