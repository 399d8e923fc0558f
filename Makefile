# Set-up, demo and tests in a virtual environment inside the checkout. `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
export PROMPT ?= What is the capital of France?
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint clean

demo: .venv/run.stamp  ## One answer from the embedded demo model, on the CPU
	$(BIN)/ninfer run demo "$$PROMPT" < /dev/null

test: .venv/dev.stamp  ## Linters, types and every test that needs no GPU
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: .venv/dev.stamp  ## The linters alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

.venv/run.stamp: pyproject.toml constraints.txt
	@echo "installing into .venv; torch is large, so this takes a few minutes" >&2
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/dev.stamp: pyproject.toml constraints.txt
	@echo "installing into .venv; torch is large, so this takes a few minutes" >&2
	$(PYTHON) -m venv .venv
	$(PIP) --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
