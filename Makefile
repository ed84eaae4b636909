# Two commands do all the set-up: `make demo` and `make test`, each in a virtual environment of its own.
PYTHON ?= python3
# Most files of the libraries are never imported: Python compiles the others when they are.
PIP_INSTALL = install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# `make soak SOAK="--faults 1000 --seed 7"`: its options.
SOAK =
# A file's tests stay together, for what they share, and the longest files come first, as tests/conftest.py sorts them.
# Three at once, also on two cores, as some tests wait; more would be in each other's way.
# xdist runs a test again that has ended its process; one that does so each time must not go on for ever.
EVERY_CORE = -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 1
SOURCES = pyproject.toml constraints.txt
# The tests start hundreds of processes, which need not compile the project each.
export PYTHONDONTWRITEBYTECODE =
# What meets most of Lightning, Hydra and MLflow. An old MLflow's server would need an old Flask as well; it is not ours.
OLDEST_TESTS = tests/strategies tests/training/test_conf.py tests/checkpoint/test_exact_moment.py \
	tests/tracking/test_logger.py tests/test_internals.py tests/huggingface --ignore=tests/huggingface/test_hub.py \
	--deselect tests/tracking/test_logger.py::test_a_server_that_goes_and_comes_back

.PHONY: demo test test-oldest test-all soak lint clean

demo: .venv/installed
	.venv/bin/azureml-strategy emulate --nodes 2 -- .venv/bin/azureml-strategy train resnet50_ddp

test: .venv-test/oldest/installed .venv-test/azurite/installed
	@$(MAKE) --no-print-directory --jobs 2 lint test-oldest
	.venv-test/bin/python -m pytest $(EVERY_CORE) --durations 25

# The oldest versions that pyproject.toml allows come first on the path. In one process: lint has the other core.
test-oldest: .venv-test/oldest/installed
	PYTHONPATH=$(CURDIR)/.venv-test/oldest .venv-test/bin/python -m pytest -q -W ignore $(OLDEST_TESTS)

test-all: lint .venv-test/azurite/installed
	.venv-test/bin/python -m pytest $(EVERY_CORE) -m "" --hypothesis-profile random -o faulthandler_timeout=3600

soak: .venv-test/installed
	.venv-test/bin/python benchmarks/soak.py $(SOAK)

lint: .venv-test/installed
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	.venv-test/bin/mypy
	.venv-test/bin/lint-imports

.venv/installed: $(SOURCES)
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip $(PIP_INSTALL) -e '.[recipes]'
	touch $@

.venv-test/installed: $(SOURCES)
	$(PYTHON) -m venv --clear .venv-test
	.venv-test/bin/pip $(PIP_INSTALL) -e '.[dev]'
	touch $@

.venv-test/oldest/installed: .venv-test/installed tests/oldest.txt
	rm -rf .venv-test/oldest
	.venv-test/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --target .venv-test/oldest -r tests/oldest.txt
	touch $@

# Azurite, Microsoft's emulator of Blob Storage; the tests that need it are skipped where it is not.
.venv-test/azurite/installed: .venv-test/installed tests/azurite/package-lock.json
	@mkdir -p $(@D)
	@cp tests/azurite/package.json tests/azurite/package-lock.json $(@D)
	@(cd $(@D) && npm ci --ignore-scripts --omit=dev --omit=optional --no-audit --no-fund --loglevel=error && touch installed) || \
		echo "Azurite could not be installed (is npm there?): the tests of Blob Storage will be skipped."

clean:
	rm -rf .venv .venv-test build dist outputs multirun mlflow.db mlruns
