# make hetu    set up, run the HetuMoE suite, print where the report is
# make test    set up with the test extra, lint, test
# make lint    ruff, and mypy on the tree as it is imported
# make clock-check  calibrate this CPU, then compare predicted and measured step times (4 minutes; keep the machine idle)
# make gpu-check  on a GPU: kernels against float64, then their speed, into results/measured/<gpu>/ (6 minutes at most;
#              needs torch and Triton and no installation; it takes PYTHON where named, else .venv's)
# make bench   the speed of the trace, the replay and the command line (pytest-benchmark; keep the machine idle)
# make clean   remove what the above built (the virtual environment too; runs/ stays)
#
# PYTHON       interpreter of the virtual environment, 3.11 or later
# OUT          folder for what gpu-check writes, instead of results/measured/<gpu>
# PARALLEL     how pytest spreads test files over processes (default: a process a core, at most 4; empty: in one)
# TORCH_INDEX  package index to look for PyTorch in, besides pip's own: PyTorch's CPU wheel index spares 3 GB of CUDA

PYTHON ?= python3
TORCH_INDEX ?=
PARALLEL ?= --numprocesses logical --maxprocesses 4 --dist loadfile

# Compiled once for the many processes of the tests, wherever Python was told not to keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
SOURCES := build/src/moebench

.DEFAULT_GOAL := help
.PHONY: help hetu test lint sources clock-check gpu-check bench clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

hetu: $(VENV)/.installed
	$(BIN)/moebench run --suite hetu

test: lint
	@mkdir -p build
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/interpreter >build/interpreter.log 2>&1 & \
	interpreter=$$!; OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL); status=$$?; \
	wait $$interpreter || status=1; echo "tests/interpreter, run beside these:"; cat build/interpreter.log; exit $$status

# mypy does not follow setuptools' package-dir from the root, so it gets the packages under the names they are imported by.
lint: $(VENV)/.installed-test sources
	$(BIN)/ruff check .
	cd build/src && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache

sources:
	rm -rf build/src
	mkdir -p $(SOURCES)
	ln -s $(CURDIR)/moebench/* $(SOURCES)/
	ln -s $(CURDIR)/kernels $(CURDIR)/systems $(CURDIR)/workloads $(CURDIR)/results/reported $(SOURCES)/

clock-check: $(VENV)/.installed
	$(BIN)/python -m benchmarks.clock_check --calibrate

# A PYTHON that was asked for, else the virtual environment's where there is one.
GPU_PYTHON = $(if $(filter file,$(origin PYTHON)),$(firstword $(wildcard $(BIN)/python) $(PYTHON)),$(PYTHON))

gpu-check: sources
	PYTHONPATH=build/src:. $(GPU_PYTHON) -P -m benchmarks.gpu_check $(if $(OUT),--out $(OUT))

bench: $(VENV)/.installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q benchmarks/bench_*.py --benchmark-enable --benchmark-columns=min,median,max,rounds

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moebench needs Python 3.11 or later; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# Stamps, so that a second make installs nothing.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing moebench and what it needs into $(VENV); the first time takes a minute or more"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	@echo "installing moebench with its test tools into $(VENV); the first time takes a minute or more"
	$(INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.installed
