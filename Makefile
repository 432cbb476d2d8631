PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch goes in first and pinned: a later resolver step must not replace the build chosen here.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-gpu lint bench clean

demo: $(VENV)/.base
	$(BIN)/gpuclassify demo $(DEMO_OPTIONS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not gpu"

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.throughput

clean:
	rm -rf $(VENV)

$(VENV)/.base: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable ".[dev]"
	touch $@
