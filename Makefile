# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs deploy-demo clean

demo: .venv/installed
	$(BIN)/covary compare

deploy-demo: .venv/installed-dev
	$(BIN)/python examples/deploy_demo.py

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(MAKE) docs
	$(BIN)/pytest

docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv site

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
