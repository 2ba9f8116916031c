# make demo, make test and the others work from a fresh clone on a machine with Python ≥ 3.11, make and a C compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input --quiet -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
WORKERS := -n auto --maxprocesses 4
TESTS ?=

.PHONY: setup demo test test-all installed dist lint format docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"Python {sys.version.split()[0]} is too old: Tapestry needs 3.11 (make PYTHON=python3.12)" if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "installing into $(VENV) (some minutes the first time)"
	@$(PIP) $(TORCH)
	@$(PIP) -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/python -m examples.demo

# the processes that tests start would each parse the package again
test test-all: export PYTHONDONTWRITEBYTECODE :=

# what newcomers and CI run: at most five minutes on two cores
test: setup
	@$(BIN)/python -m pytest $(WORKERS) $(TESTS)

# every case of every test, but those that need a GPU
test-all: setup
	@$(BIN)/python -m pytest -m 'not gpu' $(WORKERS) $(TESTS)

# a wheel and an sdist
dist: setup
	@rm -rf dist
	@$(BIN)/hatchling build -d dist

# each of them in a fresh environment, from an empty folder
installed: dist
	@$(BIN)/python -m tests.installed dist/*.whl dist/*.tar.gz

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/pyright

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# real output and measured figures into README and docs
docs: setup
	@$(BIN)/python -m tests.docs.update

clean:
	rm -rf build
