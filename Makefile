# Two commands do all the set-up: `make demo` and `make test`, each in a virtual environment of its own.
PYTHON ?= python3
PIP_INSTALL = install --quiet --disable-pip-version-check -c constraints.txt
# `make soak SOAK="--faults 1000 --seed 7"`: its options.
SOAK =
# A file's tests stay together, for what they share, and the longest files come first, as tests/conftest.py sorts them;
# more than four at once would be in each other's way.
EVERY_CORE = -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
SOURCES = pyproject.toml constraints.txt

.PHONY: demo test test-all soak lint clean

demo: .venv/installed
	.venv/bin/azureml-strategy emulate --nodes 2 -- .venv/bin/azureml-strategy train resnet50_ddp

test: lint
	.venv-test/bin/python -m pytest $(EVERY_CORE)

test-all: lint
	.venv-test/bin/python -m pytest $(EVERY_CORE) -m ""

soak: .venv-test/installed
	.venv-test/bin/python benchmarks/soak.py $(SOAK)

lint: .venv-test/installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy
	.venv-test/bin/lint-imports

.venv/installed: $(SOURCES)
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip $(PIP_INSTALL) -e .
	touch $@

.venv-test/installed: $(SOURCES)
	$(PYTHON) -m venv --clear .venv-test
	.venv-test/bin/pip $(PIP_INSTALL) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-test build dist outputs multirun mlflow.db mlruns
