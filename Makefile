# The commands of this repository. `make setup` makes .venv for machines without a GPU; the other targets bring it up to
# date themselves. With a Python of your own (a GPU machine, a container): make test PYTHON=python3

VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
GPU_PYTHON ?= python3
# -P keeps the repository's root off sys.path: kernels/ must not be importable as `kernels`.
PYTEST = $(PYTHON) -P -m pytest
# Three for two cores: a third of a worker's time it waits, for processes and for the time-outs that tests are about.
PYTEST_WORKERS = $(PYTEST) --durations=10 --numprocesses=3 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0
NEWEST = $(abspath .venv-newest)
# What touches vLLM and transformers.
ENGINE_TESTS = $(addprefix tests/unit/test_,compat.py absent_names.py engine_contract.py vllm_engine.py speculation.py draft_models.py \
	given_answers.py tools.py chat_template.py tokenizer.py) \
	$(addprefix tests/parallel/test_,vllm_engine.py regather.py learned_map.py family_rollout.py draft_ranks.py head_drafts.py) \
	tests/end_to_end/test_rollout_control.py
READY = $(if $(filter $(VENV)/bin/python,$(PYTHON)),setup)
# A folder without Python files is an error to mypy.
SOURCES = $(foreach folder,rlhf_megatron kernels launch tools,$(if $(shell find $(folder) -name '*.py' -print -quit 2>/dev/null),$(folder)))

export OMP_NUM_THREADS ?= 1
# Containers like to switch this on; then every command compiles torch, vLLM and transformers anew, for half a minute.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup demo test newest grid fuzz chaos lint gpu-test bench-cpu bench-data bench-peer bench-regather bench-rollout bench-step

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: ## Make or update .venv with pinned CPU wheels (about a minute, then nothing)
	@VENV=$(abspath $(VENV)) tools/environment/setup_cpu.sh

demo: $(READY) ## Train a small model by reinforcement learning on this machine's CPU
	@$(PYTHON) tools/demo.py

test: $(READY) ## All tests that need no GPU but the grid's, within 15 minutes on two cores
	$(PYTEST_WORKERS) -m "not grid" $(ARGS)

newest: PYTHON = $(NEWEST)/bin/python
newest: ## Tests of the engine with the newest vLLM and transformers, in .venv-newest (docs/gpus.md)
	@VENV=$(NEWEST) NEWER=tools/environment/requirements-newest.txt tools/environment/setup_cpu.sh
	$(PYTEST_WORKERS) -m "not grid" $(or $(ARGS),$(ENGINE_TESTS))

grid: $(READY) ## Every model family in every layout, and beside vLLM; `make test` has a sample
	$(PYTEST_WORKERS) -m grid $(ARGS)

fuzz: $(READY) ## Malformed input of all kinds, 5,000 examples of each (`make test` has 40); ARGS="-k recipe"
	$(PYTEST) --hypothesis-profile=many --timeout=0 tests/fuzz $(ARGS)

chaos: $(READY) ## A small run with each fault, and what became of it, in about half an hour; ARGS="--warm --only kill"
	@$(PYTHON) tools/chaos/campaign.py $(ARGS)

lint: $(READY) ## ruff, its format too, and mypy
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy $(SOURCES)

gpu-test: ## Tests on GPUs, with the Python of GPU_PYTHON
	$(GPU_PYTHON) -P -m pytest --durations=10 -m gpu $(ARGS)

bench-data: $(READY) ## Start, memory and waiting time over 10 million rows; docs/results/data.json
	$(PYTHON) tools/bench/data.py --output docs/results/data.json $(ARGS)

bench-regather: $(READY) ## Regathering against its floor and against whole tensors; docs/results/regather.json
	$(PYTHON) tools/bench/regather.py $(ARGS)

bench-rollout: $(READY) ## Generation beside LLM.generate, queue beside a static split; docs/results/rollout.json
	$(PYTHON) tools/bench/rollout.py $(ARGS)

bench-step: $(READY) ## Whole steps beside the raw engines, on GPUs; docs/results/step.json
	$(PYTHON) tools/bench/step.py $(ARGS)

bench-peer: $(READY) ## Whole steps beside TRL's or verl's, which have to be installed; docs/results/peer.json
	$(PYTHON) tools/bench/peer.py $(ARGS)

bench-cpu: $(READY) ## The same with a toy on two CPU ranks, in two minutes
	$(PYTHON) tools/bench/step.py --models toy --gpus 2 --steps 3 --repeats 2 --output runs/bench_step/cpu.json --plot $(ARGS)
