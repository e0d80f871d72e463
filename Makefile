# Two commands matter to a newcomer: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
WORKERS ?= 2
# The quickstart's name (data/NAME, runs/NAME) and its text: CORPUS="source=text path='books/*.txt'" takes your own.
NAME ?= quickstart
CORPUS ?= source=embedded

# Threads that sleep while they wait, not spin: under heavy load steps were twice as quick, else no slower (docs/LOG.md).
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help quickstart test test-gpu check install clean

help:
	@echo "make quickstart   install, then corpus -> tokenizer -> tokens -> train -> generate -> report (about 5 minutes)"
	@echo "make test         install with the test tools, then the default test suite"
	@echo "make check        ruff, then the default test suite"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "Variables: PYTHON=$(PYTHON) (3.11 to 3.13), VENV=$(VENV), NAME=$(NAME), CORPUS=\"$(CORPUS)\""

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "error: $(PYTHON) was not found; install Python 3.11 to 3.13 or name one: make PYTHON=/path/to/python3"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); mew needs Python 3.11 to 3.13: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "error: $(PYTHON) has no venv module; on Debian or Ubuntu: apt-get install python3-venv"; exit 2; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml
	@echo installing into $(VENV) ...; $(RUN) -m pip install --disable-pip-version-check -q -e . || { echo "error: pip could not install the core packages; it needs a package index (pip config list shows which one is set)"; exit 2; }
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo installing into $(VENV) ...; $(RUN) -m pip install --disable-pip-version-check -q -e '.[dev]' || { echo "error: pip could not install the test tools; it needs a package index (pip config list shows which one is set)"; exit 2; }
	@$(RUN) -m data_processing.language_identification_model || echo "without it the tests of the language stage are skipped"
	@touch $@

install: $(VENV)/.core

# The main job, by the same scripts that a user calls. Run again, each step finds its work done or goes on with it.
quickstart: $(VENV)/.core
	$(RUN) -m data_processing.build_corpus $(CORPUS) output=data/$(NAME)/corpus
	$(RUN) -m llm.bpe_training corpus=data/$(NAME)/corpus vocab_size=2048 output=data/$(NAME)/tokenizer
	$(RUN) -m llm.tokenize_corpus corpus=data/$(NAME)/corpus tokenizer=data/$(NAME)/tokenizer output=data/$(NAME)/tokens
	$(RUN) -m llm.training experiment=quickstart name=$(NAME) data.tokens=data/$(NAME)/tokens data.tokenizer=data/$(NAME)/tokenizer
	$(RUN) -m llm.evaluating run=runs/$(NAME)
	$(RUN) -m llm.generating run=runs/$(NAME) prompt="Return the" max_new_tokens=120
	$(RUN) -m configs.report_cli runs/$(NAME)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --durations=15 $(ARGS)

test-gpu: $(VENV)/.dev
	$(RUN) -m pytest -m gpu $(ARGS)

check: $(VENV)/.dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(MAKE) test

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
