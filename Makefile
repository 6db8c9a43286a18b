# make demo: from a fresh machine to the first result. make test: everything that CI runs.
# make test-matrix: the null device and the emulated process group on each torch and Python.
# make test-frameworks: frameworks that nobody changed on the null device, nightly.
# make test-tools: exported files with the tools that read them.
# make test-wheel: sdist and wheel where nothing else is. make docs: the site, in build/site.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := .venv-frameworks
SITE := .venv-docs
FRAMEWORKS_LIMIT_S ?= 7200
CASES ?=

.PHONY: demo test test-matrix test-frameworks test-tools test-wheel docs lint types unit clean

demo: $(STAMP)
	$(BIN)/prismscale run --world-size 1024 --cluster h100-sxm --device null --live 0 \
	  --watch-steps 4 --steps 5 --price 2.5/h --out runs/demo \
	  examples/llama/train.py --model 8b --tp 2 --dp-mode fsdp2 --dtype bf16

test: lint types unit

lint: $(STAMP)
	$(BIN)/ruff check src tests bench examples tools
	$(BIN)/ruff format --check src tests bench examples tools
	$(BIN)/lint-imports
	$(BIN)/python bench/house.py

types: $(STAMP)
	$(BIN)/mypy
	cd bench && $(abspath $(BIN))/mypy --config-file mypy.ini *.py

unit: $(STAMP)
	scripts/ensure-chromium
	$(BIN)/pytest -n 2 --dist loadfile

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

test-wheel: $(STAMP)
	scripts/test-wheel $(BIN)/python

test-tools: $(STAMP)
	scripts/test-tools $(BIN)/python

docs: $(SITE)/.installed
	$(SITE)/bin/python scripts/build-site

$(SITE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/pip install --quiet --upgrade pip
	$(SITE)/bin/pip install --quiet --group docs
	touch $@

test-matrix:
	$(PYTHON) scripts/test-matrix $(TORCH)

test-frameworks: $(FRAMEWORKS)/.installed
	timeout $(FRAMEWORKS_LIMIT_S) $(FRAMEWORKS)/bin/python bench/null_matrix.py $(CASES)

$(FRAMEWORKS)/.installed: pyproject.toml constraints-frameworks.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet --upgrade pip
	$(FRAMEWORKS)/bin/pip install --quiet --constraint constraints-frameworks.txt \
	  --editable ".[frameworks]"
	$(FRAMEWORKS)/bin/pip install --quiet --no-deps --constraint constraints-frameworks.txt \
	  transformer-engine
	touch $@

clean:
	rm -rf $(VENV) .venv-matrix $(FRAMEWORKS) $(SITE) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
