"""What our tiers are told for a run, in TOML."""

from __future__ import annotations

EDGE_TOML = """\
[agent]
log_format = "json"
cache_dir = "{cache}"

[gateway]
port = {port}
api_keys = ["{key}"]

[grpc]
enabled = true
port = {grpc}

[cors]
allow_origins = ["{page}"]

[jobs]
dir = "{jobs}"

[models]
variants = ["smollm2-135m-int8", "all-minilm-l6-v2-int8"]
preload = ["smollm2-135m-int8", "all-minilm-l6-v2-int8"]
kv_slots = 4
context_tokens = {context}

{studio}
[router]
# What is asked here is whether clients work; this machine may be busy with other things.
ttft_slo_ms = 60000.0
"""
CLOUD_TOML = """\
[server]
port = {port}
log_format = "json"

[grpc]
enabled = true
port = {grpc}

[cors]
allow_origins = ["{page}"]

[jobs]
dir = "{jobs}"

{models}

[router]
ttft_slo_ms = 60000.0
"""
ENGINE_TOML = """\
[[models]]
variant = "smollm2-135m-fp32"
device = "cpu"
max_running = 8
max_context_tokens = {context}

[[models]]
variant = "all-minilm-l6-v2"
device = "cpu"
"""
BACKEND_TOML = """\
[[backends]]
name = "vllm"
kind = "openai"
urls = ["{url}"]
api_key = "{key}"

[[backends.models]]
served = "smollm2-135m"
variant = "smollm2-135m-vllm"
family = "smollm2-135m"

[[backends]]
name = "vllm-embeddings"
kind = "openai"
urls = ["{embeddings_url}"]
api_key = "{key}"

[[backends.models]]
served = "all-minilm-l6-v2"
variant = "all-minilm-l6-v2-vllm"
family = "all-minilm-l6-v2"
"""
