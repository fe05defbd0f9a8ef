# `make demo` and `make test` work on a fresh clone; the first of them makes .venv.
#   make test PYTHON=python3.12                 another interpreter
#   make test TORCH="torch==2.13.0+cpu"         another build of torch (any arguments of `pip install`)
#   make test PYTEST_ARGS="-k layout"           other arguments for pytest
#   make ops OPS_ARGS="--again"                 all operators anew; --help lists the arguments
#   make models MODELS_ARGS="llama gpt2"        these architectures only; --help lists the arguments

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
OPS_ARGS ?=
MODELS_ARGS ?=
CUDA_ARGS ?=
GPU_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=
MODEL_PACKAGES := .models
TRITON := .triton

BIN := .venv/bin
# The stamp is named after TORCH, so that another TORCH is another installation, and touched only when all went well.
STAMP := .venv/.installed-$(shell printf '%s' '$(TORCH)' | cksum | cut -d' ' -f1)

# What `make test-fast` runs: each stage of the pipeline in one process, nothing that compiles or starts ranks.
FAST := tests/shapes tests/cost tests/inspect tests/layout/test_layouts.py tests/layout/test_redistribution.py tests/mesh/test_mesh.py \
	$(addprefix tests/strategies/,engine/test_notation.py engine/test_engine.py linear/test_matmul.py) \
	$(addprefix tests/solver/,search/test_core_problem.py primal/test_exact.py test_limited.py) \
	$(addprefix tests/passes/trace/,test_capture.py fakes/test_symbols.py) $(addprefix tests/passes/annotation/test_,annotate.py verify.py) \
	$(addprefix tests/passes/,planning/test_constrain.py planning/test_constrain_errors.py lowering/test_lower.py test_pipeline.py) \
	tests/plans/test_plan_json.py tests/test_errors.py tests/runtime/module/test_module_state.py tests/runtime/module/test_objects.py

# One thread a process: the workers of pytest share the cores, and results do not depend on the machine. A file stays on one worker: what its
# tests share (a trace, processes that ran all scenarios) is made once. tests/conftest.py orders the files, the longest first. Compiled modules are kept (PYTHONDONTWRITEBYTECODE is empty), or each
# worker, and each process that a test starts, would compile them again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-fast slow equal pairs ops models cuda gpu bench solver quality fuzz mutants lint types imports clean prerequisites venv

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile

demo: $(STAMP) ## shard a model on this machine and show what was decided
	$(BIN)/fxshard demo

test: $(TRITON)/.installed lint types imports ## everything that must pass before a commit
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(STAMP) lint ## the inner loop: ruff and a fixed part of the tests, under 90 s on two cores
	$(PYTEST) $(FAST) $(PYTEST_ARGS)

slow: $(STAMP) ## every test that is too long for the suite (hours)
	$(PYTEST) -m slow $(PYTEST_ARGS)

equal: $(STAMP) ## the full sweep: sharded models against one device (long)
	$(PYTEST) -m slow tests/models tests/distributed $(PYTEST_ARGS)

pairs: $(STAMP) ## redistributions between every two layouts, against whole tensors and torch's planners (long)
	$(PYTEST) -m slow tests/layout/test_every_pair.py tests/bench/test_redistribution.py $(PYTEST_ARGS)

ops: $(STAMP) ## operator coverage beside DTensor; resumes where it was stopped; writes docs/operators.md (under an hour on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.operators $(OPS_ARGS)

models: $(MODEL_PACKAGES)/.installed ## 94 architectures, sharded, against one device; resumes where it was stopped; writes docs/models.md (an hour; a minute for one)
	OMP_NUM_THREADS=1 PYTHONPATH=$(MODEL_PACKAGES) $(BIN)/python -m bench.models $(MODELS_ARGS)

# In a folder of their own: a torchvision that does not fit the build of torch breaks transformers wherever it is found.
$(MODEL_PACKAGES)/.installed: $(STAMP)
	$(BIN)/pip install --quiet --no-deps --target $(MODEL_PACKAGES) "timm==1.0.31" "torchvision==0.28.0" "peft==0.21.2" "accelerate==1.15.0" "psutil==7.2.2"
	@touch $@

cuda: $(TRITON)/.installed ## eight models, three plans each, to machine code of an H100 that need not be there (half an hour)
	OMP_NUM_THREADS=1 PYTHONPATH=$(TRITON) $(BIN)/python -m bench.cuda $(CUDA_ARGS)

gpu: $(STAMP) ## on a machine with 1 to 8 GPUs: numerics, step times, memory, prices, dropout, in gpu.json; without one it says so
	$(BIN)/python -m bench.gpu $(GPU_ARGS)

# Beside the other packages: where Triton is found, torch answers questions about GPUs differently. It holds NVIDIA's assembler; no GPU needed.
$(TRITON)/.installed: $(STAMP)
	$(BIN)/pip install --quiet --no-deps --target $(TRITON) "triton==3.9.0"
	@touch $@

bench: $(STAMP) ## every bench in one run of at most 36 minutes and a last cell; a slowdown beyond noise fails; writes docs/benchmarks.md
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.all $(BENCH_ARGS)

solver: $(STAMP) ## the solver on published instances in the folder FXSHARD_DATA (about ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.solver

quality: $(STAMP) ## ten models on five meshes, auto beside known plans, evaluated without fxshard's prices (an hour)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.quality $(QUALITY_ARGS)

fuzz: $(STAMP) ## 10,000 mutated programs, plans, checkpoints, hardware and solver files, traces: refused or equal (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.fuzz $(FUZZ_ARGS)

mutants: $(STAMP) ## breaks 30 places drawn at random, one by one: the tests must notice at least 27 (hours)
	$(BIN)/python tools/mutants.py --pytest "-n $(PYTEST_WORKERS)"

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/python -m mypy

imports: $(STAMP) ## the direction of imports, private torch names, lengths of files
	$(BIN)/python tools/check_imports.py

clean: ## remove caches and build products (not .venv: rm -rf .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .venv -prune -o -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

venv: $(STAMP) ## .venv with everything the other targets need

prerequisites: ## what this machine lacks, if anything
	@PYTHON='$(PYTHON)' sh tools/check_prerequisites.sh

# torch goes first and by itself, so that pip takes the build its configured sources offer and nothing replaces it.
$(STAMP): pyproject.toml | prerequisites
	rm -f .venv/.installed-*
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[test]'
	@$(BIN)/python -c 'import fxshard.solver; fxshard.solver.warm_up()'  # compiles its loops
	@$(BIN)/python -c 'import torch, fxshard; print(f".venv is ready: torch {torch.__version__}")'
	@touch $@
