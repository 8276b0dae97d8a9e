# A machine with Python 3.10 to 3.13, pip and make is enough: every target sets up what it needs, once.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.demo
READY := $(VENV)/.ready
PEERS_VENV := .venv-peers
PEERS_READY := $(PEERS_VENV)/.ready
DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
NEWEST := 2.13.0
NEWEST_VENV := .venv-newest
NEWEST_READY := $(NEWEST_VENV)/.ready
TYPES := build/types/collage_neuron
IN_PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal

export PJRT_DEVICE ?= CPU
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONDONTWRITEBYTECODE  # images set it; then every process that tests start compiles all of the source again

.DEFAULT_GOAL := help
.PHONY: help setup demo study accuracy test mutants test-newest lint docs bench tables doctor device clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# 1200 steps take two and a half minutes on two idle cores. OMP_NUM_THREADS=1 helps where others keep the cores busy.
demo: $(DEMO_READY)  ## train a small language model in bf16, compensated bf16 and fp32, and compare
	@echo "== demo: examples/pretrain.py --device cpu --steps 1200"
	@began=$$(date +%s); $(BIN)/python examples/pretrain.py --device cpu --steps 1200 && \
	    echo "demo: trained and drew for $$(($$(date +%s) - began)) s"

study: $(READY)  ## measure what each strategy does to training, and write docs/development/study.md: half an hour on two cores
	@echo "== study: examples/study"
	@$(BIN)/python examples/study

accuracy: $(PEERS_READY)  ## measure every strategy against float64 and other packages, and write docs/accuracy.md
	@echo "== accuracy: benchmarks/accuracy"
	@$(PEERS_VENV)/bin/python benchmarks/accuracy

test: lint  ## lint, then run every test (no accelerator needed)
	@echo "== test: pytest"
	@$(BIN)/python -m pytest $(IN_PARALLEL) --durations 40

mutants: $(READY)  ## plant faults in the source, and see the tests notice each: not part of CI
	@WHOLE=1 $(BIN)/python -m pytest $(IN_PARALLEL) -m mutants tests/repository/test_planted_faults.py

# What torch could break: recording, its privates, its optimizers, checkpoints, DDP. Values are torch 2.9's test, and XLA
# needs the torch that it was built for. And TorchNeuron's device, which torch 2.9 cannot have: in processes of its own,
# since autograd takes the devices that it knows when it is first used.
NEWEST_TESTS := tests/conversion/test_wrapping.py tests/checkpoint/test_old_pickles.py tests/checkpoint/test_dcp.py \
    tests/optimizers/test_torch_optim.py \
    tests/passes/test_rules.py tests/runtime/test_exact_methods.py tests/repository/test_torch_privates.py tests/trace \
    tests/distributed/test_traced.py

test-newest:  ## run the tests that need no XLA with the newest torch, in .venv-newest
	@$(MAKE) --no-print-directory $(NEWEST_READY) || { echo "newest torch not available: skipped"; exit 0; }; \
	test -e $(NEWEST_READY) || exit 0; \
	echo "== test-newest: pytest with torch $(NEWEST)"; \
	$(NEWEST_VENV)/bin/python -m pytest $(IN_PARALLEL) $(NEWEST_TESTS) && \
	$(NEWEST_VENV)/bin/python -m pytest $(IN_PARALLEL) tests/torchneuron

lint: $(READY) $(TYPES)/__init__.py  ## ruff check, ruff format --check, mypy --strict
	@echo "== lint: ruff check, ruff format --check, mypy"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(DOCS_READY)  ## build the site in build/site; a link that leads nowhere is an error
	@echo "== docs: mkdocs build"
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict  # not --quiet, which does not count warnings

bench: $(READY)  ## time one optimizer step: benchmarks/step_time.py
	@echo "== bench: benchmarks/step_time.py"
	@$(BIN)/python benchmarks/step_time.py

# The machine should be idle. 124 M parameters and more: 8 GB of memory.
tables: $(PEERS_READY)  ## measure again what README.md and benchmarks/README.md show of step times: 40 minutes, QUICK=1 10
	@echo "== tables: benchmarks/host_time.py, monitor_cost.py, stage_cost.py, step_time.py, tables.py"
	@$(PEERS_VENV)/bin/python benchmarks/host_time.py --rounds $(TIMES_FEW) --json benchmarks/results/host_time.json
	@$(PEERS_VENV)/bin/python benchmarks/monitor_cost.py --backends native --strategies bf16 plus --threads 1 2 \
	    --rounds $(TIMES_MANY) --json benchmarks/results/monitor_cost.json
	@$(PEERS_VENV)/bin/python benchmarks/stage_cost.py --processes $(TIMES_FEW) --rounds $(TIMES_MANY) \
	    --json benchmarks/results/stage_cost.json
	@$(PEERS_VENV)/bin/python benchmarks/step_time.py $(if $(QUICK),,--peers) --threads 1 2 --processes $(TIMES_FEW) \
	    --rounds $(TIMES_MANY) --patience $(if $(QUICK),0.3,0.8) --json benchmarks/results/step_time.json
	@$(PEERS_VENV)/bin/python benchmarks/tables.py

TIMES_FEW = $(if $(QUICK),1,3)
TIMES_MANY = $(if $(QUICK),7,15)

# Neuron's own environment has the torch that its device needs, and must not get another; there, torch_xla finds the device
# by itself.
NEURONS = $(PYTHON) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch_neuronx") is None)'
ON_NEURON = env -u PJRT_DEVICE PYTHONPATH=".:$$PYTHONPATH" $(PYTHON)

doctor:  ## say what this machine can run, and probe that no rounding is lost on it
	@echo "== doctor: python -m collage_neuron doctor"
	@if $(NEURONS); then $(ON_NEURON) -m collage_neuron doctor; \
	else $(MAKE) --no-print-directory $(READY) && $(BIN)/python -m collage_neuron doctor; fi

# Without Neuron's environment kernels run on the stand-in of the tests. QUICK=1: some of each section.
device:  ## on a Trainium: collect probe, steps, times and bytes into one file to send, out/device_report.json
	@echo "== device: examples/device_report.py"
	@if $(NEURONS); then $(ON_NEURON) examples/device_report.py $(if $(QUICK),--quick); \
	else \
	    $(MAKE) --no-print-directory $(READY) && \
	    $(BIN)/python examples/device_report.py --simulator tests/support $(if $(QUICK),--quick); \
	fi

setup: $(READY)  ## create .venv with everything the other targets need

clean:  ## remove .venv and everything built
	rm -rf $(VENV) $(NEWEST_VENV) $(PEERS_VENV) $(DOCS_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage

# An environment whose pip knows dependency groups; the one that Python brings may be older. Debian's python3 may lack
# ensurepip (package python3-venv): the pip outside then fills the environment.
new_environment = { $(PYTHON) -m venv $(1) >/dev/null 2>&1 || { \
	    $(PYTHON) -m venv --clear --without-pip $(1) && \
	    $(PYTHON) -m pip --quiet --python $(1)/bin/python install pip; }; } && \
	    $(1)/bin/python -m pip install --quiet 'pip>=25.1'

# What examples/pretrain.py needs: the torch that the extra "xla" wants too, so that it stays when the rest is installed.
$(DEMO_READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit(f"Python 3.10 to 3.13 is \
	needed (torch_xla has no wheel for another), this is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.12")'
	@echo "== set-up: installing torch into $(VENV): two to four minutes, 7 GB (its default wheel carries CUDA libraries)"
	@began=$$(date +%s); $(call new_environment,$(VENV)) && \
	$(BIN)/python -m pip install --quiet "$$(sed -n 's/^xla = \["\(torch==[^"]*\)".*/\1/p' pyproject.toml)" \
	    --editable '.[native,demo]' && echo "set-up: $$(($$(date +%s) - began)) s"
	@touch $@

$(READY): $(DEMO_READY)
	@echo "== set-up: installing what the tests, the linters and the examples need into $(VENV)"
	@$(BIN)/python -m pip install --quiet --editable '.[xla,native,demo,report,trainers]' --group test --group lint
	@touch $@

# Other people's optimizers, in an environment of their own that reads everything else from .venv.
$(PEERS_READY): $(READY)
	@echo "== set-up: installing the packages of the group \"peers\" into $(PEERS_VENV)"
	@rm -f $@
	@$(PYTHON) -m venv --without-pip $(PEERS_VENV)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	    $$($(PEERS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_main.pth
	@$(PEERS_VENV)/bin/python -m pip install --quiet . --group peers
	@touch $@

# No torch: the API reference is read from the source. Ten seconds.
$(DOCS_READY): pyproject.toml
	@echo "== set-up: installing the packages of the group \"docs\" into $(DOCS_VENV)"
	@rm -f $@
	@$(call new_environment,$(DOCS_VENV))
	@$(DOCS_VENV)/bin/python -m pip install --quiet --group docs
	@touch $@

# No torch_xla, which has no release for it; `test` is what the tests import, `demo` what examples/pretrain.py does.
$(NEWEST_READY): pyproject.toml Makefile
	@echo "== set-up: installing torch $(NEWEST) into $(NEWEST_VENV)"
	@rm -f $@
	@$(call new_environment,$(NEWEST_VENV))
	@$(NEWEST_VENV)/bin/python -m pip install --quiet 'torch==$(NEWEST)' --editable '.[demo]' --group test
	@touch $@

# mypy does not run the __path__ bridge; here the two folders have the names they are imported by.
$(TYPES)/__init__.py:
	@mkdir -p $(TYPES)
	@ln -sfn ../../../passes $(TYPES)/passes
	@ln -sfn ../../../kernels_nki $(TYPES)/kernels_nki
	@touch $@
