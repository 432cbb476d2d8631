PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch goes in first and pinned: a later resolver step must not replace the build chosen here.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test test-gpu test-weights lint bench clean

demo: $(VENV)/.base
	$(BIN)/gpuclassify demo $(DEMO_OPTIONS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not gpu and not needs_weights"

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

# Golden cases with real weights: make test-weights CASES=cases.jsonl (the format: tests/golden.py)
test-weights: $(VENV)/.dev
	$(BIN)/python -m pytest -m needs_weights --golden "$(CASES)"

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
