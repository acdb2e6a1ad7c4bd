"""Libraries that tell their makers how they are used: in a process of ours, and in what it starts, they do not."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_SILENCED = {
    # ONNX Runtime's wheels for Linux since 1.29: names and sizes of models, errors, an id of the machine in $HOME.
    "ORT_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


def silence_usage_reports(environ: MutableMapping[str, str] = os.environ) -> None:
    """Switch them off in the environment, which has to be before they are imported.

    A variable that is set keeps its value: who runs this decides.
    """
    for name, value in _SILENCED.items():
        environ.setdefault(name, value)
