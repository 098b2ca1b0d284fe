# Every target makes .venv and installs what it needs by itself; a second run installs nothing.
#
#   make demo       fine-tune the packaged tiny model into a product reranker, and show what it learned
#   make test       the tests                     make test-all   also the slow ones
#   make lint       ruff and mypy                 make format     let ruff rewrite the layout
#   make docs       the documentation into site/
#
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

# Where this is set, every one of the many processes would compile torch and transformers anew, 5 to 10 s each.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all lint format docs

help:
	@sed -n '/^# *make/s/^# *//p' Makefile

demo: $(VENV)/.installed-core
	$(BIN)/litchi demo --out runs/demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

test-all: $(VENV)/.installed-all
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --slow

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or newer is needed ($(PYTHON): $$($(PYTHON) --version 2>&1 || true))." \
	       "Name another one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "== making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# One pip call per set of extras; the stamp is made when it ended well. With `--no-compile` a module is compiled when it
# is first imported (5 s more, once) instead of all 6 GB now.
INSTALL = $(PIP) install --no-compile --editable
ONCE := (once: some minutes and 6 GB, most of it torch)

$(VENV)/.installed-core: pyproject.toml | $(BIN)/python
	@echo "== installing Litchi $(ONCE)"
	@$(INSTALL) '.[serve]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "== installing Litchi and the test tools $(ONCE)"
	@$(INSTALL) '.[dev]'
	@touch $(VENV)/.installed-core $@

# with Ray, 20 s and 200 MB more, which only slow tests need
$(VENV)/.installed-all: pyproject.toml | $(BIN)/python
	@echo "== installing Litchi, the test tools and Ray $(ONCE)"
	@$(INSTALL) '.[dev,ray]'
	@touch $(VENV)/.installed-core $(VENV)/.installed-dev $@

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	@echo "== installing Litchi and the documentation tools $(ONCE)"
	@$(INSTALL) '.[docs]'
	@touch $(VENV)/.installed-core $@
