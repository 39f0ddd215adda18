# SPDX-License-Identifier: Apache-2.0
# make demo: serve a tiny Kimi-K2.5 with and without the overlay, and print what it changes.
# make test: everything that the tests need, then the tests.
VENV ?= .venv

.PHONY: demo test lint clean

demo:
	@tools/cpu_engine.sh $(VENV)
	@$(VENV)/bin/python examples/demo.py

test:
	@tools/cpu_engine.sh $(VENV) test
	@$(MAKE) --no-print-directory lint
	$(VENV)/bin/python -m pytest

lint:
	@tools/cpu_engine.sh $(VENV) test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis
