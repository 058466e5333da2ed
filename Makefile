# Everything lives in $(VENV); `make clean` removes it. PYTHON may name any Python from 3.11 on.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# Modules are compiled when they are first imported: compiling all of them takes longer than unpacking.
PIP_INSTALL := $(PY) -m pip install --no-compile --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test test-gpu lint clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.installed
	@$(PY) examples/demo_ar.py
	@$(PY) examples/serve_dllm.py
	@$(PY) examples/demo_t2i.py

test: $(VENV)/.installed-dev
	@$(PY) -m pytest $(ARGS)

# What a machine with a CUDA device can check, in minutes.
test-gpu: $(VENV)/.installed-dev
	@$(PY) -m pytest -m gpu $(ARGS)

lint: $(VENV)/.installed-dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy genserve

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache .mypy_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "genserve needs Python 3.11 or later; %s is %s. Name another: make PYTHON=..." % (sys.executable, sys.version.split()[0]))'
	@echo "Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	@echo "Installing the pinned dependencies: about two minutes and 1 GB to download the first time, 3 GB or"
	@echo "more where the package index has torch with CUDA (PyPI on Linux)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the development tools"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
