# Two commands matter to a newcomer: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
THREADS ?= 2

.PHONY: help quickstart test test-gpu check install docs-links clean

help:
	@echo "make quickstart   install, then corpus -> tokenizer -> tokens -> train -> generate -> report (about 5 minutes)"
	@echo "make test         install with the test tools, then the default test suite"
	@echo "make check        ruff, then the default test suite"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "Variables: PYTHON=$(PYTHON) (3.11 to 3.13), VENV=$(VENV)"

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "error: $(PYTHON) was not found; install Python 3.11 to 3.13 or name one: make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); mew needs Python 3.11 to 3.13: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml
	$(RUN) -m pip install --disable-pip-version-check -q -e . || { echo "error: pip could not install the core packages; it needs a package index (pip config list shows which one is set)"; exit 2; }
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(RUN) -m pip install --disable-pip-version-check -q -e '.[dev]' || { echo "error: pip could not install the test tools; it needs a package index (pip config list shows which one is set)"; exit 2; }
	@touch $@

install: $(VENV)/.core

quickstart: $(VENV)/.core
	$(RUN) -m llm.quickstart $(ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(THREADS) --durations=15 $(ARGS)

test-gpu: $(VENV)/.dev
	$(RUN) -m pytest -m gpu $(ARGS)

check: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(MAKE) test

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
