# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

# The tests of the mathematics and of invalid input: no subprocesses, no browser, no data to download.
CORE := $(patsubst %,tests/test_%.py,contract oracle reductions equations invariant bad_input theory)

.PHONY: demo check lint test nightly docs wheel mutants deploy-demo screenshots clean

demo: .venv/installed
	$(BIN)/covary compare --open

deploy-demo: .venv/installed-dev
	$(BIN)/python examples/deploy_demo.py

# On every commit, in half a minute; before a change is merged, in six minutes; every night, in half an hour.
check: .venv/installed-dev lint
	$(BIN)/pytest $(CORE)

test: .venv/installed-dev .venv/axe lint docs
	$(BIN)/pytest

nightly: .venv/installed-dev .venv/axe wheel mutants
	COVARY_CONFIGURATIONS=10000 $(BIN)/pytest tests/test_any_configuration.py
	$(BIN)/pytest -m nightly -n 1

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Are the tests able to fail? Changes to the code that make test must notice.
mutants: .venv/installed-dev
	$(BIN)/python tests/mutants.py

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel and the sdist, and the wheel in an empty environment.
wheel: .venv/installed-dev
	rm -rf dist .venv/empty
	$(BIN)/python -m build --outdir dist > /dev/null
	$(PYTHON) -m venv .venv/empty
	.venv/empty/bin/pip install --quiet dist/*.whl
	cd .venv/empty && bin/covary compare --seeds 1 --rounds 30 --quiet --json | bin/python -m json.tool > /dev/null
	ls -l dist
	rm -rf .venv/empty

screenshots: .venv/installed-dev
	$(BIN)/python docs/screenshots.py

clean:
	rm -rf .venv site dist

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "covary needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 demo"; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/installed: .venv/made pyproject.toml
	@echo "Installing covary and what it needs into .venv (once) ..."
	$(BIN)/pip install --quiet --editable .
	@touch $@

.venv/installed-dev: .venv/made pyproject.toml
	@echo "Installing covary, what it needs and what tests it into .venv (once) ..."
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@ .venv/installed

.venv/axe: .venv/made
	@npm install --silent --no-save --prefix .venv axe-core@4.14.0 && touch $@ \
	  || echo "axe-core could not be installed with npm: the test of accessibility is skipped."
