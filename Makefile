# A machine with Python 3.10 to 3.13, pip and make is enough: every target sets up what it needs, once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TYPES := build/types/collage_neuron

export PJRT_DEVICE ?= CPU
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo study test lint bench doctor clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY)  ## train a small language model in bf16, compensated bf16 and fp32, and compare
	@echo "== demo: examples/pretrain.py"
	@$(BIN)/python examples/pretrain.py

study: $(READY)  ## measure what each strategy does to training, and write docs/study.md: half an hour on two cores
	@echo "== study: examples/study"
	@$(BIN)/python examples/study

test: lint  ## lint, then run every test (no accelerator needed)
	@echo "== test: pytest"
	@$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

lint: $(READY) $(TYPES)/__init__.py  ## ruff check, ruff format --check, mypy --strict
	@echo "== lint: ruff check, ruff format --check, mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)  ## time one optimizer step: benchmarks/step_time.py
	@echo "== bench: benchmarks/step_time.py"
	@$(BIN)/python benchmarks/step_time.py

doctor: $(READY)  ## say what this machine can run, and probe that no rounding is lost on it
	@echo "== doctor: python -m collage_neuron doctor"
	@$(BIN)/python -m collage_neuron doctor

setup: $(READY)  ## create .venv with everything the other targets need

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage

# Debian's python3 may lack ensurepip (package python3-venv); the pip outside then fills the environment.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit(f"Python 3.10 to 3.13 is \
	needed (torch_xla has no wheel for another), this is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.12")'
	@echo "== set-up: installing into $(VENV): three to five minutes, 7 GB (torch's default wheel carries CUDA libraries)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
	    $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; }
	@$(BIN)/python -m pip install --quiet --editable '.[xla,demo,trainers,test,lint]'
	@touch $@

# mypy does not run the __path__ bridge; here the two folders have the names they are imported by.
$(TYPES)/__init__.py:
	@mkdir -p $(TYPES)
	@ln -sfn ../../../passes $(TYPES)/passes
	@ln -sfn ../../../kernels_nki $(TYPES)/kernels_nki
	@touch $@
