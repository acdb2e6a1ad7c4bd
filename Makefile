# The two commands anyone needs: `make demo` and `make test`. Both set up everything they need, once.
# On a machine without an NVIDIA GPU, spare yourself the CUDA wheels: make demo TORCH_INDEX=URL, where URL is the index
# of CPU builds that PyTorch's install page names.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMPS := .overspill/stamps
# The commas of a requirement would end an argument of $(if).
TORCH  := torch>=2.11,<2.14

export OVERSPILL_MODELS ?= $(CURDIR)/.overspill/models
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test test-fast check bench bench-routing bench-decision bench-engine bench-gpu bench-gateway compatibility models clean broker proto compiled interpreted bench-compiled

demo: $(STAMPS)/run broker models
	$(BIN)/python -m examples.demo $(if $(KEEP),--keep)

test: $(STAMPS)/dev broker models
	$(BIN)/python -m pytest $(ARGS)

# Everything that needs no model, broker or process of its own, in some minutes.
test-fast: $(STAMPS)/dev
	$(BIN)/python -m pytest --fast -n 2 $(ARGS)

check: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:randomly tests/test_import_arrows.py

bench: $(STAMPS)/dev broker models
	$(BIN)/python -m benchmarks

# What share of the possible each policy keeps, on published traces; QUICK=1 for a part of it.
bench-routing: $(STAMPS)/dev
	$(BIN)/python -m benchmarks $(if $(QUICK),--unkept) routing -- $(if $(QUICK),--quick) $(ARGS)

# What a decision costs, interpreted and compiled by turns, and what 10,000 waiting requests do to the event loop.
bench-decision: $(STAMPS)/dev
	$(BIN)/python -m benchmarks router_decision compiled long_queue

# The embedded engine beside vLLM's CPU build and llama.cpp's server, each from an environment of its own:
# OVERSPILL_BENCH_VLLM_PYTHON and OVERSPILL_BENCH_LLAMA_PYTHON name their interpreters; QUICK=1 for one short round.
bench-engine: $(STAMPS)/dev models
	$(BIN)/python -m benchmarks $(if $(QUICK),--unkept) engine -- $(if $(QUICK),--quick --rounds 1) $(ARGS)

# What the door costs, beside a bare server, nginx (Debian's nginx-light), LiteLLM, sglang-router, and ours of before.
bench-gateway: $(STAMPS)/dev
	$(BIN)/python -m benchmarks gateway -- $(ARGS)

# Where there is an NVIDIA GPU: the engine's decoding against the memory's bandwidth and transformers, and every path
# through CUDA, NCCL and TensorRT.
bench-gpu: $(STAMPS)/dev models
	$(BIN)/python -m benchmarks gpu -- $(ARGS)

# The descriptor that the gRPC gateway reads, after a change of its .proto file.
proto: $(STAMPS)/dev
	$(BIN)/python -m grpc_tools.protoc -I router/gateway/grpc --descriptor_set_out=router/gateway/grpc/inference.binpb inference.proto

# Compile what decides, beside its sources: every command and test of this checkout then runs it. Edited sources run
# once they are compiled again; `make interpreted` takes it away. PROFILED=1 has GCC lay it out by what runs most.
compiled: $(STAMPS)/dev
	OVERSPILL_COMPILE=$(if $(PROFILED),profiled,1) $(BIN)/python setup.py --quiet build_ext --inplace
	@$(BIN)/overspill --version

interpreted:
	rm -f overspill__mypyc.*.so
	find router -name '*.so' -delete
	rm -f router/base/compiled.json

# Decisions and the simulator, interpreted, compiled and profiled by turns; fails where a simulation's rows differ.
bench-compiled: $(STAMPS)/dev
	$(BIN)/python -m benchmarks compiled -- $(ARGS)

# Real clients, each in an environment of its own, against edge, cloud, cloud over vLLM, vLLM and Triton: writes
# docs/compatibility.md. CLIENTS="langchain curl" and SERVERS="edge cloud" run a part; `--list` in ARGS names them all.
compatibility: $(STAMPS)/dev models
	$(BIN)/python -m benchmarks compatibility -- $(if $(CLIENTS),--clients $(CLIENTS)) $(if $(SERVERS),--servers $(SERVERS)) $(ARGS)

models: $(STAMPS)/run
	@$(BIN)/overspill models pull smollm2-135m --prepare
	@$(BIN)/overspill models pull all-minilm-l6-v2 --prepare
	@$(BIN)/overspill models pull centerface --prepare

broker:
	@deploy/install-mosquitto.sh

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Overspill needs Python 3.10 or newer; $(PYTHON) is older. Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python3-venv is missing. On Debian or Ubuntu: sudo apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }

# What the demo runs: both tiers, the toolchain and the openai client.
$(STAMPS)/run: pyproject.toml | $(VENV)/bin/python
	@echo "Installing Overspill into $(VENV) (a few minutes, once) …"
	$(if $(TORCH_INDEX),@$(BIN)/python -m pip install --quiet "$(TORCH)" --index-url $(TORCH_INDEX))
	@$(BIN)/python -m pip install --quiet --editable '.[edge,cloud,demo]'
	@mkdir -p $(STAMPS) && touch $@

# What the tests and `make check` need on top.
$(STAMPS)/dev: $(STAMPS)/run
	@echo "Installing the development tools into $(VENV) …"
	@$(BIN)/python -m pip install --quiet --editable '.[edge,cloud,demo,dev]'
	@touch $@

clean: interpreted
	rm -rf $(VENV) .overspill build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
