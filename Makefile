# Two commands do all the set-up: `make demo` and `make test`, each in a virtual environment of its own.
PYTHON ?= python3
# Most files of the libraries are never imported: Python compiles the others when they are.
PIP_INSTALL = install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# `make soak SOAK="--faults 1000 --seed 7"`: its options.
SOAK =
# `make test-versions VERSIONS="--only lowest --python 3.12"`: its options.
VERSIONS =
# Tests that mostly wait are beside others that compute: see tests/workers.py.
WORKERS = 8
PYTEST = .venv-test/bin/python -m pytest --workers=$(WORKERS)
# What chooses the share of the exhaustive tests that runs each time: see tests/rota.py.
COMMIT = $(shell git rev-parse HEAD 2> /dev/null || date +%F)
# The three layers of ARCHITECTURE.md: what runs in a job, recipes, and what a person at a desk uses.
JOB = $(addprefix tests/,checkpoint cluster control hang_detection huggingface multiprocess network preemption profiling \
	situations strategies tracking test_forks.py test_gpus.py test_import_hook.py test_mpi.py test_plugin.py test_pytorch_lightning.py \
	test_sequence_parallel.py)
RECIPES = $(addprefix tests/,data gpu models training hydra_plugins)
DESK = $(addprefix tests/,bench cli documentation emulator examples faults jobs planning reporting serving study test_benchmark_scripts.py \
	test_architecture.py test_benchmarks.py test_cli.py test_command_line.py test_docs.py test_fuzz.py test_hidden_gpus.py test_import_weight.py test_inside.py test_internals.py \
	test_lazy.py test_lint.py test_packaging.py test_release.py test_suite.py)
SOURCES = pyproject.toml constraints.txt
# The tests start hundreds of processes, which need not compile the project each.
export PYTHONDONTWRITEBYTECODE =
# What meets most of Lightning, Hydra and MLflow. An old MLflow's server would need an old Flask as well; it is not ours.
OLDEST_TESTS = tests/strategies tests/training/test_conf.py tests/checkpoint/test_exact_moment.py \
	tests/tracking/test_logger.py tests/test_internals.py tests/huggingface --ignore=tests/huggingface/test_hub.py \
	--deselect tests/tracking/test_logger.py::test_a_server_that_goes_and_comes_back

# `make release-check TAG=v1.2.0` for a release that is being made; STEPS="build check_metadata" for some of it.
TAG =
STEPS =

# `make test-gpu GPU="--only demo"`: its options.
GPU =
# The Python that has the project installed, as on a machine with wheels only; otherwise that of .venv-test, made here.
WITH_PROJECT = if $(PYTHON) -c "import azureml_strategy, lightning, pytest" 2> /dev/null; then python=$(PYTHON); \
	else $(MAKE) --no-print-directory .venv-test/installed && python=.venv-test/bin/python; fi

.PHONY: demo test test-job test-recipes test-desk test-gpu gpu test-oldest test-all test-docs test-versions soak lint lint-workflows docs licenses release-check clean

demo: .venv/installed
	.venv/bin/azureml-strategy emulate --nodes 2 -- .venv/bin/azureml-strategy train resnet50_ddp

# The oldest versions, only where something they depend on has changed since they passed.
test: test-set-up
	@.venv-test/bin/python -m tests.oldest > /dev/null || $(MAKE) --no-print-directory test-oldest
	$(PYTEST) --rota=$(COMMIT) --durations 25

test-job: test-set-up
	$(PYTEST) $(JOB)

test-recipes: test-set-up
	$(PYTEST) $(RECIPES)

test-desk: test-set-up
	$(PYTEST) $(DESK)

.PHONY: test-set-up
test-set-up: .venv-test/azurite/installed .venv-test/inference/installed

# One NVIDIA GPU, five minutes: what no CPU can show. `make test` hides GPUs, and so is the same on every machine.
test-gpu:
	@$(WITH_PROJECT); $$python -m tests.gpu $(GPU)

# Eight minutes: test-gpu and the benchmarks of a GPU. The results are kept in benchmarks/results.
gpu:
	@$(WITH_PROJECT); $$python benchmarks/on_a_gpu.py $(GPU)

# The oldest versions that pyproject.toml allows come first on the path.
test-oldest: .venv-test/oldest/installed
	state=$$(.venv-test/bin/python -m tests.oldest); \
	PYTHONPATH=$(CURDIR)/.venv-test/oldest $(PYTEST) -q -W ignore $(OLDEST_TESTS) && \
	.venv-test/bin/python -m tests.oldest --passed $$state

# Everything, and how long it took: build/times.json.
test-all: test-set-up
	$(PYTEST) -m "" --hypothesis-profile random -o faulthandler_timeout=3600 --times=build/times.json

# Every block of the pages that can run here; `make test` runs those of some pages.
test-docs: .venv-test/installed
	$(PYTEST) -m "" tests/documentation tests/test_docs.py

# Gigabytes of downloads, and a long time: see docs/versions.md.
test-versions: .venv-test/installed
	.venv-test/bin/python tests/versions.py $(VERSIONS)

soak: .venv-test/installed
	.venv-test/bin/python benchmarks/soak.py $(SOAK)

# Strict and offline: a broken link, a missing anchor or a public name without a docstring fails it. build/site/docs/index.html
docs: .venv-test/installed
	DS_ACCELERATOR=cpu .venv-test/bin/python -m sphinx -c docs -b html -d build/doctrees -W --keep-going -n . build/site

lint: .venv-test/installed
	.venv-test/bin/python -m pytest -q tests/test_lint.py

# zizmor looks for what an attacker could do with a workflow; the schemas are GitHub's.
lint-workflows: .venv-release/installed
	.venv-release/bin/zizmor --offline --quiet --persona pedantic .github
	.venv-release/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv-release/bin/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	.venv-release/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	.venv-release/bin/check-jsonschema --builtin-schema vendor.github-issue-forms \
		.github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml

licenses: .venv-test/installed
	.venv-test/bin/python release/licenses.py --write

# The files of the release go into dist: docs/releases.md.
release-check: lint-workflows
	.venv-release/bin/python release/check.py $(STEPS) $(if $(TAG),--tag $(TAG))

.venv/installed: $(SOURCES)
	@echo "Installing the tested versions into .venv: some minutes, the first time."
	$(PYTHON) -m venv --clear .venv
	.venv/bin/pip $(PIP_INSTALL) -e '.[recipes]'
	touch $@

.venv-test/installed: $(SOURCES)
	@echo "Installing the tested versions into .venv-test, for tests, lint and docs: some minutes, the first time."
	$(PYTHON) -m venv --clear .venv-test
	.venv-test/bin/pip $(PIP_INSTALL) -e '.[dev]'
	touch $@

.venv-test/oldest/installed: .venv-test/installed tests/oldest.txt
	rm -rf .venv-test/oldest
	.venv-test/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --target .venv-test/oldest -r tests/oldest.txt
	touch $@

.venv-release/installed: release/requirements.txt
	$(PYTHON) -m venv --clear .venv-release
	.venv-release/bin/pip install --quiet --disable-pip-version-check --require-hashes -r release/requirements.txt
	touch $@

# Azurite, Microsoft's emulator of Blob Storage; the tests that need it are skipped where it is not.
.venv-test/azurite/installed: .venv-test/installed tests/azurite/package-lock.json
	@mkdir -p $(@D)
	@cp tests/azurite/package.json tests/azurite/package-lock.json $(@D)
	@(cd $(@D) && npm ci --ignore-scripts --omit=dev --omit=optional --no-audit --no-fund --loglevel=error && touch installed) || \
		echo "Azurite could not be installed (is npm there?): the tests of Blob Storage will be skipped."

# Azure ML's inference server, which needs other versions than constraints.txt has: it comes first on the path of an
# environment of its own, and torch and the rest from the tests' one.
.venv-test/inference/installed: .venv-test/installed environments/online.txt
	$(PYTHON) -m venv --clear .venv-test/inference
	.venv-test/inference/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r environments/online.txt
	echo "import site; site.addsitedir('$$(.venv-test/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(.venv-test/inference/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth"
	touch $@

clean:
	rm -rf .venv .venv-test .venv-release .venv-versions build dist outputs multirun mlflow.db mlruns
