SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := runs/demo

.PHONY: demo test test-kernels gpu-tests torture quick check format docs clean

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing atas into $(VENV): PyTorch and the packages of the tests, several hundred megabytes, once ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The field's story on real embedded data: standard training, a collapse, and a model that withstands AutoAttack.
demo: $(INSTALLED)
	@$(BIN)/atas demo --out $(DEMO)

test: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist worksteal

# The inner loop: all but slow tests. make quick T=tests/attacks runs one package.
quick: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow" $(T)

# The kernels on the CPU. In a process of its own: once imported, they would run interpreted in all other tests as well.
test-kernels: $(INSTALLED)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow" tests/ops/triton

# All tests that need a GPU, the kernels among them; they end within four minutes, and the output is in runs/gpu-tests.log.
# With a Python that has PyTorch for CUDA already: make gpu-tests INSTALLED= PYTEST="python -m pytest"
PYTEST = $(BIN)/pytest
gpu-tests: $(INSTALLED)
	@mkdir -p runs
	set -o pipefail; PYTHONPATH=$(CURDIR)/src OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 timeout -s INT -k 15 220 \
		$(PYTEST) -m gpu -n auto --maxprocesses 12 --dist worksteal -rfE --durations=10 tests 2>&1 | tee runs/gpu-tests.log

# The fault suite: kills, damaged files, wrong values, scarce machines, two of everything at once. Minutes.
torture: $(INSTALLED)
	PYTHONPATH=tests $(BIN)/python -m torture

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in site/: opens from disk, fetches nothing. Its packages are no part of what tests need.
DOCS := $(VENV)/.docs
$(DOCS): $(INSTALLED)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) runs site build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
