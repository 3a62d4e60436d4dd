# The developer's interface. `make help` lists the targets.
.DEFAULT_GOAL := help
.PHONY: help tasks quickstart harnesses bench clean
.PHONY: check check-style check-types check-structure
.PHONY: test test-unit test-sim test-contract test-integration test-chaos test-harness test-full

VENV := .venv
READY := $(VENV)/.installed
PY := $(VENV)/bin/python
SEED ?= 1
CHAOS_SEED ?= $(shell date +%Y%m%d)
TASKS := build/quickstart/tasks

help:
	@echo "make quickstart  train a small agent on this machine; SEED=n repeats it with another seed"
	@echo "make tasks       only make the quickstart's tasks"
	@echo "make test        unit, sim, contract and integration tests"
	@echo "make test-chaos  kills and stops cells of real runs; CHAOS_SEED=n draws another sample"
	@echo "make test-full   the slow ones too, and real agent programs"
	@echo "make harnesses   install the agent programs that test-harness starts (1.5 GB)"
	@echo "make check       style, types, layers, sizes"
	@echo "make bench       timings of this machine"
	@echo "make clean       remove what was built, but keep run folders"

$(READY): pyproject.toml checks/venv.sh
	@checks/venv.sh $(VENV)

$(TASKS)/.made: $(READY) examples/quickstart/make_tasks.py examples/quickstart/families.py
	@rm -rf $(TASKS)
	@$(PY) examples/quickstart/make_tasks.py --seed 31 --num 32 --out $(TASKS)/train
	@$(PY) examples/quickstart/make_tasks.py --seed 32 --num 32 --out $(TASKS)/eval --avoid $(TASKS)/train
	@touch $@

tasks: $(READY) $(TASKS)/.made

quickstart: $(READY) $(TASKS)/.made
	@$(VENV)/bin/gyre train examples/quickstart/quickstart.toml --set run.seed=$(SEED)

harnesses: $(READY)
	@checks/harnesses.sh .harnesses $(PY)

check: check-style check-types check-structure

check-style: $(READY)
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet .

check-types: $(READY)
	@$(PY) -m mypy --strict

check-structure: $(READY)
	@$(PY) -m checks.layers
	@$(PY) -m checks.size
	@$(PY) -m checks.folders

test: test-unit test-sim test-contract test-integration

# A folder without tests passes: pytest ends with 5 when it collects none.
test-unit test-sim test-contract test-integration: test-%: $(READY)
	@if [ -d tests/$* ]; then $(PY) -m pytest tests/$* || [ $$? -eq 5 ]; fi

# Each day draws another sample of the matrix of faults.
test-chaos: $(READY)
	@echo "CHAOS_SEED=$(CHAOS_SEED)"
	@CHAOS_SEED=$(CHAOS_SEED) $(PY) -m pytest tests/chaos

test-harness: harnesses
	@$(PY) -m pytest -rs tests/harness

test-full: $(READY) harnesses
	@$(PY) -m pytest -m "not gpu" tests

bench: $(READY)
	@for file in $(filter-out benchmarks/smollm2.py,$(wildcard benchmarks/*.py)); do echo "$$file"; $(PY) "$$file" || exit 1; done

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf
