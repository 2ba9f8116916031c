# make demo and make test work from a fresh clone on a machine with Python ≥ 3.11, make and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
TESTS ?=

.PHONY: setup demo test slow lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"Python {sys.version.split()[0]} is too old: Tapestry needs 3.11 (make PYTHON=python3.12)" if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PIP) $(TORCH)
	@$(PIP) -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/python examples/demo.py

test: setup
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 $(TESTS)

slow: setup
	@$(BIN)/python -m pytest -m slow $(TESTS)

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports
	@$(BIN)/pyright

bench: setup
	@$(BIN)/python -m bench communication
	@$(BIN)/python -m bench compiler
	@$(BIN)/python -m bench scale
	@$(BIN)/python -m bench auto_shard
	@$(BIN)/python -m bench models

clean:
	rm -rf build
