"""Compiles the router's decisions with mypyc where OVERSPILL_COMPILE=1 asks for it; all else stands in pyproject.toml.

    OVERSPILL_COMPILE=1 pip install .          a wheel for this machine and this Python
    OVERSPILL_COMPILE=profiled pip install .   laid out by what simulations run most: GCC compiles it twice
    make compiled, make interpreted            beside the sources of a checkout, and gone again

The sources stay what they are and what runs by default. Compiled, they answer alike: the same simulations give the same
rows (`make bench-compiled`, and a test), and the tests pass (`make compiled`, then `make test`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

WANTED = os.environ.get("OVERSPILL_COMPILE", "0")
if WANTED not in {"0", "1", "profiled"}:
    raise SystemExit(
        f"OVERSPILL_COMPILE={WANTED}: 1 compiles the router, profiled does it twice (GCC alone), "
        "0 or nothing leaves it interpreted"
    )
ASKED = WANTED != "0"
OPT_LEVEL = os.environ.get("MYPYC_OPT_LEVEL", "2")  # from 2 on, code that handles errors lies apart
# mypyc follows every import to know its types, so it needs what the compiled modules import.
NEEDED = ["mypy>=2.4,<2.5", "msgspec>=0.18", "numpy>=1.26", "prometheus-client>=0.20", "structlog>=24"]
if sys.version_info < (3, 11):
    NEEDED.append("tomli>=2")
REHEARSED = ["orjson>=3.10", "psutil>=5.9", "python-multipart>=0.0.20,<1"]  # what a simulation imports besides
BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}

MODULES = {
    "router/base": "alarms",
    "router/values": "choice length link offer prediction replica situation",
    "router/signals": (
        "affinity at_stake breaker canary configurations credit_account credit_line credits exploration fairness "
        "health in_flight ladder latency learnt length level link occupancy peak_latency prefill replica_state "
        "sequential shadow signals token_clock upper what_if"
    ),
    "router/policy": (
        "cloud_first earliest_deadline least_load local_first local_only lowest_latency min_completion peak_ewma "
        "promise quality_in_objective queueing random_choice slo_utility smallest_rung threshold urgency worth"
    ),
    "router/dispatch": "admission dispatcher",
    "router/dispatch/records": "decision_value plain_counters record telemetry",
    "router/dispatch/attempts": "answer_room blame budget give_up hedge run stream",
    "router/dispatch/replicas": "peers pool served view",
    "router/dispatch/assessment": "candidates pending rejections",
    "router/dispatch/binding": "binder free_slots imagining lost_promises queue refusals slots",
    "router/dispatch/journey": "feedback journey outcomes",
    "router/simulation": "call device loop network prefix_cache replica run values",
}
"""What decides, leads each attempt, and simulates. `async` generators, structs that are decoded, and what waits for
the network stay interpreted."""
SOURCES = [f"{room}/{module}.py" for room, modules in MODULES.items() for module in modules.split()]


class _Afresh(build_py):
    """Builds from the sources alone: what an earlier release had left in `build/` would be installed with this one."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class _Build(build_ext):
    """Leaves beside the modules what they were compiled from: a changed source no longer runs, and that must show."""

    def build_extensions(self) -> None:
        """Have as many files compiled at once as there are processors: each module is a file of its own."""
        one = self.compiler.compile
        processors = len(os.sched_getaffinity(0))

        def all_at_once(sources: Sequence[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(processors) as pool:
                found = list(pool.map(lambda source: one([source], **options), sources))
            return [path for paths in found for path in paths]

        self.compiler.compile = all_at_once
        self.parallel = self.parallel or processors
        if WANTED == "profiled":
            self._profile()
        super().build_extensions()

    def _profile(self) -> None:
        """Compile with counters, simulate, and leave what was counted where the compilation that follows looks for it.

        Both compile the same C files into the same objects, beside which GCC keeps the counts.
        """
        _require_gcc(self.compiler.compiler_so[0])
        for old in Path(self.build_temp).rglob("*.gcda"):
            old.unlink()
        meant, self.force = self.build_lib, True
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree("router", Path(folder, "router"), ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            self.build_lib = folder
            self._ask_of_gcc("-fprofile-generate")
            super().build_extensions()
            command = [sys.executable, "-m", "router.simulation.rehearsal"]
            paths = os.pathsep.join((folder, *sys.path))  # pip has installed what it needs apart
            subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, check=True)
        self.build_lib = meant
        self._ask_of_gcc("-fprofile-use", "-Wno-missing-profile")

    def _ask_of_gcc(self, *profile: str) -> None:
        for extension in self.extensions:
            for options in (extension.extra_compile_args, extension.extra_link_args):
                options[:] = [*(option for option in options if not option.startswith("-fprofile-")), *profile]

    def run(self) -> None:
        super().run()
        if not ASKED:
            return
        manifest = {
            "suffix": sysconfig.get_config_var("EXT_SUFFIX"),
            "sources": {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in SOURCES},
        }
        folder = Path() if self.inplace else Path(self.build_lib)
        (folder / "router/base/compiled.json").write_text(json.dumps(manifest, indent=1) + "\n")


def _require_gcc(compiler: str) -> None:
    macros = subprocess.run([compiler, "-dM", "-E", "-xc", os.devnull], capture_output=True, text=True, check=False)
    if "__GNUC__" not in macros.stdout or "__clang__" in macros.stdout:
        raise SystemExit(f"OVERSPILL_COMPILE=profiled wants GCC, and the C compiler here, {compiler}, is none: say 1")


def _extensions() -> list[Extension]:
    if not ASKED or not BUILDS.intersection(sys.argv):
        return []
    from mypyc.build import mypycify  # noqa: PLC0415 - only there where it is asked for

    extensions = mypycify(
        ["--follow-imports=silent", *SOURCES],
        group_name="overspill",
        multi_file=True,
        opt_level=OPT_LEVEL,
        debug_level="0",
    )
    for extension in extensions:
        # One rounding for each operation, as the interpreter does; nothing but the modules' own entries is seen from
        # outside, so that functions call one another directly; and a compiler's new warning breaks nobody's build.
        more = ["-ffp-contract=off", "-fvisibility=hidden", "-Wno-error"]
        extension.extra_compile_args = [*extension.extra_compile_args, *more]
    return extensions


setup(
    ext_modules=_extensions(),
    cmdclass={"build_py": _Afresh, "build_ext": _Build},
    setup_requires={"0": [], "1": NEEDED, "profiled": NEEDED + REHEARSED}[WANTED],
)
