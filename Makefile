# SPDX-License-Identifier: Apache-2.0
# make demo: serve a tiny Kimi-K2.5 with and without the overlay, and print what it changes.
# make test: everything that the tests need, then the tests.
# make drift: the fixes against the source of every release of vLLM; make matrix: on every release's engine, and the
# table of docs/COMPATIBILITY.md.
VENV ?= .venv

# make mutate: mutants of layers/ and patching/ that the quick tests must kill; make fuzz: ten minutes of atheris over
# the parsers.

.PHONY: demo test lint drift matrix mutate fuzz clean

demo:
	@tools/cpu_engine.sh $(VENV)
	@$(VENV)/bin/python examples/demo.py

test:
	@tools/cpu_engine.sh $(VENV) test
	@$(MAKE) --no-print-directory lint
	# A timing has the machine to itself; the rest runs a file a core, in the order that tests/conftest.py gives.
	# test_target.py is for engines that don't speculate: of this one tests/alignment asks more.
	$(VENV)/bin/python -m pytest tests/bench/test_step_time.py
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=60 \
	  --ignore tests/bench/test_step_time.py --ignore tests/engines/test_target.py

lint:
	@tools/cpu_engine.sh $(VENV) test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

drift:
	@tools/cpu_engine.sh $(VENV) test
	$(VENV)/bin/python -m pytest tests/drift

matrix: drift
	$(VENV)/bin/pip install --quiet nox
	$(VENV)/bin/nox --session engine
	$(VENV)/bin/python -m tools.compatibility write

mutate:
	@tools/cpu_engine.sh $(VENV) test
	$(VENV)/bin/pip install --quiet mutmut==3.8.1
	nice -n 19 $(VENV)/bin/mutmut run --max-children 2
	$(VENV)/bin/mutmut results

fuzz:
	@tools/cpu_engine.sh $(VENV) test
	$(VENV)/bin/pip install --quiet atheris==3.0.0
	$(VENV)/bin/python tools/fuzz_parsers.py

clean:
	rm -rf mutants $(VENV) .cache .pytest_cache .ruff_cache .hypothesis
