# negchain: six words. `make demo` and `make test` need nothing but Python 3.11+.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv  # two minutes where pip takes four
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[dev]'
	touch $@

.PHONY: demo test check test-slow test-gpu bench docs faults

demo: $(VENV)/.installed  ## train EMC² on digits and say where the report is
	$(BIN)/negchain train

# Two workers and some thirty children import what is compiled once.
test: $(VENV)/.installed check  ## lint, types and every test that runs without a GPU
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 2 --dist loadfile

check: $(VENV)/.installed  ## ruff and mypy
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check -q src tests examples benchmarks
	$(BIN)/mypy

test-slow: $(VENV)/.installed  ## the long statistical and convergence tests
	$(BIN)/python -m pytest -q -m slow

test-gpu: $(VENV)/.installed  ## tests that need a CUDA device; -m gpu alone has the slow ones too
	$(BIN)/python -m pytest -q -m 'gpu and not slow' -n 6 --dist worksteal

bench: $(VENV)/.installed  ## speed of everything on this machine, as ratios, with a record
	$(BIN)/negchain bench

docs: $(VENV)/.installed  ## the pages as a site, build/site; broken links and undocumented names fail
	$(BIN)/python -m pytest -q tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

faults: $(VENV)/.installed  ## try every fault of docs/reliability.md and write its table (some minutes)
	$(BIN)/python benchmarks/faults.py
