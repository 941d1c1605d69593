# Every target sets up what it needs on a machine that has only Python 3.11 and make.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
export TOKENIZERS_PARALLELISM := false

.PHONY: setup demo test lint bench fuzz coverage clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt 'setuptools>=77' torch
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

demo: setup
	$(BIN)/python -m dithoist demo --out out

test: setup
	$(BIN)/python -m pytest -n auto --dist loadfile tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy cannot follow an editable install whose root is the package, so show it the package under its name.
	@mkdir -p $(VENV)/typing && ln -sfn ../.. $(VENV)/typing/dithoist
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -m dithoist -m dithoist.__main__ -p dithoist.passes -p dithoist.models -p dithoist.runtime -p dithoist.bench

bench: setup
	$(BIN)/python -m bench $(ARGS)

fuzz: setup
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest tests -k "property or equivalence or coverage"

coverage: setup
	HYPOTHESIS_PROFILE=fuzz $(BIN)/python -m pytest -c tests/pytest.ini tests/test_coverage.py --coverage-table=docs/coverage.md

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
