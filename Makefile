# SPDX-License-Identifier: Apache-2.0
# Needs python3 (>= 3.11) with venv and pip; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DELETE_ON_ERROR:
.PHONY: run test test-slow test-integration lint clean help

help:
	@echo "make run    the parity job: sample checkpoints through every executor, table + parity-out/"
	@echo "make test   the test suite"
	@echo "make test-slow   what it leaves out: the same paths on more kernels and at real dimensions"
	@echo "make test-integration   inside real vLLM and tpu-inference, on the CPU; installs both (11 GB)"
	@echo "make lint   ruff, mypy, import contracts"

# torch first and by its exact version: a range would let pip prefer a newer, larger build where one is on offer.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isomoe needs Python >= 3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 setuptools wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

run: $(STAMP)
	$(BIN)/isomoe parity

# Two workers and one thread each: the interpreters are single-threaded, and a small machine has two cores.
test: $(STAMP)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

test-slow: $(STAMP)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# One environment and one run a leg; see tests/integration/setup_env.sh.
LEGS := tpu vllm
LEG_RUNS := $(LEGS:%=test-integration-%)
.PHONY: $(LEG_RUNS)
.PRECIOUS: .venv-integration-%/.installed

test-integration: $(LEG_RUNS)

.venv-integration-%/.installed: tests/integration/setup_env.sh constraints-integration-common.txt \
		constraints-integration-%.txt pyproject.toml
	rm -rf $(@D)
	PYTHON=$(PYTHON) tests/integration/setup_env.sh $* $(@D)
	touch $@

$(LEG_RUNS): test-integration-%: .venv-integration-%/.installed
	ISOMOE_TEST_LEG=$* $(<D)/bin/python -m pytest tests/integration

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy .
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .venv-integration-* build dist *.egg-info parity-out
