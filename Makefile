# `make demo` and `make test` do all set-up from nothing into .venv. `make` alone lists the targets.

VENV   ?= .venv
PYTHON ?=
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
EXTRAS := plot,test,dev

# .venv is installed without byte code. Where this variable forbids to keep what the first import makes, every process
# compiles PyTorch and Megatron again: a rank then takes 20 s of CPU time to start instead of 7 (2 cores, 11/2026).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu test-versions test-integrations lint format compile clean distclean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=/path/to/python chooses the interpreter (3.12 or 3.13) for .venv."

setup: $(STAMP)  ## make .venv and install this package with pinned dependencies

# A name on PATH proves nothing (version managers leave shims that fail), so every candidate is run.
FIND_PYTHON = for candidate in "$(PYTHON)" python3.12 python3.13 python3 python \
    $$(for root in "$$PYENV_ROOT" "$$(pyenv root 2>/dev/null)" "$$HOME/.pyenv"; do \
        [ -n "$$root" ] && ls -d "$$root"/versions/3.12*/bin/python "$$root"/versions/3.13*/bin/python 2>/dev/null; done); do \
    [ -n "$$candidate" ] || continue; \
    found=$$("$$candidate" -c 'import sys, venv, ensurepip; (3, 12) <= sys.version_info[:2] < (3, 14) and print(sys.executable)' 2>/dev/null); \
    [ -n "$$found" ] && break; \
    [ "$$candidate" = "$(PYTHON)" ] && break; \
  done

# --no-compile: byte code is made when a file is first imported; most of what is installed never is.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then \
	  $(FIND_PYTHON); \
	  if [ -z "$$found" ]; then \
	    echo "No Python 3.12 or 3.13 that runs (with venv) was found$(if $(PYTHON), as PYTHON=$(PYTHON))." >&2; \
	    echo "Install one, e.g. 'apt-get install python3.12 python3.12-venv' or 'pyenv install 3.12'," >&2; \
	    echo "or name one: make setup PYTHON=/path/to/python3.12" >&2; \
	    exit 2; \
	  fi; \
	  echo "creating $(VENV) with $$found"; \
	  "$$found" -m venv --clear $(VENV) || exit 2; \
	fi
	$(BIN)/python -m pip install --no-compile -e '.[$(EXTRAS)]' -c constraints.txt
	@touch $@

demo: setup  ## train a small Megatron GPT on 2 CPU ranks, stock and overlapped, and compare
	$(BIN)/commfuse demo --ranks 2 --steps 20 --dtype float32 --device cpu

# Two files side by side: many tests wait for one process to start. Not where there is a GPU (see test-gpu).
TEST_WORKERS ?= $(if $(wildcard /dev/nvidia0),0,2)

# No new workers for those that die: pytest-xdist 3.8 gives a new one the file again, with the test that killed the first,
# and in the end waits for a worker that has nothing to do.
test: setup  ## run the test suite
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(PYTEST_ARGS)

# The oldest and the newest Megatron-Core that pyproject.toml allows and we have run.
MEGATRON_VERSIONS := 0.18.2 0.19.2
VERSION_STAMPS    := $(MEGATRON_VERSIONS:%=$(VENV)-megatron-%/.installed)

# Each in an environment of its own. pip downloads what .venv has once: the rest comes out of its cache.
$(VENV)-megatron-%/.installed: pyproject.toml constraints.txt $(STAMP)
	$(BIN)/python -m venv --clear $(@D)
	grep -v '^megatron-core==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --no-compile -e '.[test]' 'megatron-core==$*' -c $(@D)/constraints.txt
	@touch $@

# All versions are run, also after one has failed.
test-versions: $(VERSION_STAMPS)  ## run the Megatron tests against each Megatron-Core version
	@status=0; for version in $(MEGATRON_VERSIONS); do \
	  echo "== megatron-core $$version"; \
	  python=$(VENV)-megatron-$$version/bin/python; \
	  $$python -c "import importlib.metadata as m, sys; sys.exit(m.version('megatron-core') != '$$version')" || exit 1; \
	  $$python -m pytest tests/megatron $(PYTEST_ARGS) || status=1; \
	done; exit $$status

# Adapters, quantisers and exporters of others, in an environment of their own: they pin what this project does not.
INTEGRATIONS := $(VENV)-integrations

# Bridge without what it declares: kernels that compile against a GPU, trackers of experiments. It imports none of them.
$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt $(STAMP)
	$(BIN)/python -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --no-compile -e '.[test,integrations]' -c constraints.txt
	$(@D)/bin/python -m pip install --no-compile --no-deps 'megatron-bridge; python_version < "3.13"' -c constraints.txt
	@touch $@

# What pip shall install as Transformer Engine, a requirement or wheels; without it the tests of both bridges are skipped.
TRANSFORMER_ENGINE ?=

test-integrations: $(INTEGRATIONS)/.installed  ## run what other libraries do with our layers (LoRA, quantisers, export)
	$(if $(TRANSFORMER_ENGINE),$(INTEGRATIONS)/bin/python -m pip install --no-compile $(TRANSFORMER_ENGINE) -c constraints.txt)
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations -rs $(PYTEST_ARGS)

# One test after the other: ranks that share a GPU with those of other tests only take turns.
test-gpu: setup  ## what needs two GPUs: tests, verify and demo over NCCL, verify over the copy engine
	$(BIN)/python -m pytest tests/gpu -v --durations 15 $(PYTEST_ARGS)
	$(BIN)/torchrun --nproc-per-node 2 -m commfuse_megatron verify --device cuda
	$(BIN)/torchrun --nproc-per-node 2 -m commfuse_megatron verify --device cuda --transport copy_engine
	$(BIN)/torchrun --nproc-per-node 2 -m commfuse_megatron demo --device cuda --dtype bfloat16
	$(BIN)/torchrun --nproc-per-node 2 -m commfuse_megatron demo --device cuda --dtype float32

lint: setup  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## rewrite files as ruff formats them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

compile: setup  ## byte-compile everything (a quick syntax check)
	$(BIN)/python -m compileall -q commfuse_megatron tests examples

clean:  ## remove caches and what demo and trace wrote
	rm -rf build dist demo_output trace_output .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info
	find commfuse_megatron tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv and those of test-versions and test-integrations too
	rm -rf $(VENV) $(MEGATRON_VERSIONS:%=$(VENV)-megatron-%) $(INTEGRATIONS)
