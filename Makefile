PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := runs/demo

.PHONY: demo test check format clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The paper's story on real embedded data: FGSM-RS with too large a step, ATTA, ATAS.
demo: $(INSTALLED)
	@for method in fgsm-rs atta atas; do \
		$(BIN)/atas train digits-small-cnn-$$method --out $(DEMO)/$$method --overwrite --evaluate || exit 1; \
	done
	$(BIN)/atas compare $(DEMO)/fgsm-rs $(DEMO)/atta $(DEMO)/atas --plot $(DEMO)/curves.png

test: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist worksteal

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
