"""Play the demo: `make demo`, or `make demo KEEP=1` to keep everything up afterwards."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from pathlib import Path

import openai

from examples.demo.processes import StackError
from examples.demo.scenes import SCENES, Stage, fleet_set
from examples.demo.show import SceneResult, Screen
from examples.demo.stack import DEVICE, FLEET, Stack, StackOptions, fastest_dtype

# Nothing may hang: a scene that takes longer than this has failed.
SCENE_TIMEOUT_S = 120.0
# A queue that scene 4's burst overflows on any machine, however fast, and scene 3's does not.
EDGE_ROUTER = """\
max_queue = 24
overload_enter = 0.5
"""


async def play(folder: Path, keep: bool) -> int:
    """Run all scenes; returns the exit code."""
    task = asyncio.current_task()
    if task is not None:  # as Ctrl-C does: whoever ends the demo ends its processes too
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    screen = Screen()
    screen.console.print("Starting mosquitto, the cloud tier (tensor parallel 2) and one edge agent …")
    started_s = time.monotonic()
    results: list[SceneResult] = []
    async with Stack(folder, StackOptions(edge_router=EDGE_ROUTER, dtype=fastest_dtype())) as stack:
        screen.console.print(f"All up after {time.monotonic() - started_s:.1f} s; logs and configuration in {folder}")
        client = openai.AsyncOpenAI(base_url=f"{stack.edge_url}/v1", api_key="none", max_retries=0, timeout=100)
        stage = Stage(stack, client, screen)
        for number, (title, scene) in enumerate(SCENES, 1):
            result = SceneResult(title)
            results.append(result)
            screen.scene(number, title)
            scene_started_s = time.monotonic()
            try:
                await asyncio.wait_for(scene(stage, result), SCENE_TIMEOUT_S)
            except asyncio.TimeoutError:
                result.check(False, f"everything ends within {SCENE_TIMEOUT_S:.0f} s")
            except (StackError, openai.OpenAIError) as error:
                result.check(False, f"{type(error).__name__}: {error}")
            result.took_s = time.monotonic() - scene_started_s
            screen.verdict(result)
        screen.summary(results, time.monotonic() - started_s)
        broken = [f"scene {number} ({r.title})" for number, r in enumerate(results, 1) if r.failures]
        if broken:
            screen.console.print(f"[bold red]Not kept: {', '.join(broken)}[/bold red]")
        if keep:
            await _stay(screen, stack)
        await client.close()
    return 1 if broken else 0


async def _stay(screen: Screen, stack: Stack) -> None:
    chat = (
        '{"model":"smollm2-135m","temperature":0,"max_tokens":32,'
        '"messages":[{"role":"user","content":"What is the capital of France?"}]}'
    )
    broker = f"127.0.0.1:{stack.broker_port}"
    await fleet_set(stack, "--unset", "router.policy")  # scene 7's; the device is first again
    screen.console.print("\nEverything stays up; press Ctrl-C to end it. Try:\n", style="bold")
    for line in (
        f"curl -i {stack.edge_url}/v1/chat/completions -H 'content-type: application/json' -d '{chat}'",
        f"curl {stack.edge_url}/v1/decisions/REQUEST_ID     # the x-request-id of the reply above",
        f"curl {stack.edge_url}/metrics | grep overspill_",
        f".venv/bin/overspill fleet get {DEVICE} --fleet {FLEET} --broker {broker}",
        f".venv/bin/overspill fleet set {DEVICE} router.policy=local-first --fleet {FLEET} --broker {broker}",
    ):
        screen.console.print(f"  {line}", markup=False, soft_wrap=True)
    with contextlib.suppress(asyncio.CancelledError):  # Ctrl-C is how this ends well
        await asyncio.Event().wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave everything up and print curl lines to try")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overspill-demo-") as folder:
        try:
            return asyncio.run(play(Path(folder), arguments.keep))
        except StackError as error:
            print(f"The demo could not start: {error}", file=sys.stderr)
            return 1
        except (KeyboardInterrupt, asyncio.CancelledError):
            return 130


if __name__ == "__main__":
    sys.exit(main())
