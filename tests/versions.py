"""Installs the oldest and the newest versions that pyproject.toml allows, on each Python, and runs what must pass.

`make test-versions` runs all of it; `make test-versions VERSIONS="--only lowest --python 3.12"` a part. What passed is
written to tests/versions.json, which docs/versions.md shows and tests/test_packaging.py compares with the bounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "versions.json"
FOLDER = ROOT / ".venv-versions"
PYTHONS = ("3.11", "3.12", "3.13")
RESOLUTIONS = {"lowest": "lowest-direct", "highest": "highest"}
SHOWN = ("torch", "lightning", "deepspeed", "mlflow", "azure-ai-ml", "hydra-core", "transformers")
# The others come as wheels: a version without one for this Python is not one that a user would get.
ONLY_AS_SOURCE = ("deepspeed", "antlr4-python3-runtime")
# What meets the libraries; tests of our own code alone need one set of versions.
TESTS = (
    *("tests/test_internals.py", "tests/test_plugin.py", "tests/training/test_conf.py", "tests/strategies"),
    *("tests/checkpoint", "tests/tracking", "tests/huggingface", "tests/models"),
    # Each strategy on two ranks and more beside one process, and what an earlier release has written.
    *("tests/multiprocess/test_ddp.py", "tests/multiprocess/test_zero.py", "tests/multiprocess/test_pipeline.py"),
    *("tests/multiprocess/test_model_parallel.py", "tests/multiprocess/test_local_sgd.py"),
    "tests/multiprocess/test_released.py",
    *("tests/jobs/test_client.py", "tests/jobs/test_render.py", "tests/jobs/test_render_recorded.py"),
    *("tests/jobs/test_submit.py", "tests/jobs/test_sweep.py", "tests/jobs/test_workspace.py"),
)
# A part of them for a short look: names of others, every recipe, checkpoints, two ranks under each strategy.
QUICK = (
    *(
        "tests/test_internals.py",
        "tests/test_plugin.py",
        "tests/training/test_conf.py",
        "tests/multiprocess/test_released.py",
    ),
    *("tests/checkpoint/test_job_checkpoint.py", "tests/checkpoint/test_consolidate.py", "tests/jobs/test_render.py"),
)
# MLflow 2.19 would need an old Flask for its server, which is not ours.
SERVERS = (
    *("--ignore=tests/tracking/test_outages.py", "--ignore=tests/tracking/test_offline_queue.py"),
    "--deselect=tests/tracking/test_logger.py::test_a_server_that_goes_and_comes_back",
    "--deselect=tests/tracking/test_run_location.py::test_the_address_is_that_of_the_run_s_page",
)
SHORT = ("trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1", "data.batch_size=8")


class FailedError(RuntimeError):
    """What is to pass has not. The text says what failed first."""


@dataclass
class Case:
    """One set of versions on one Python.

    Attributes:
        only: `lowest` or `highest`.
        python: its version, as 3.12.
        quick: whether `QUICK` was run instead of `TESTS`.
        date: when it was run.
        versions: those of `SHOWN`, and the full one of Python; empty if nothing could be installed.
        checks: by name `passed`, or what failed first.
        seconds: what it took.
    """

    only: str
    python: str
    quick: bool = False
    date: str = field(default_factory=lambda: date.today().isoformat())
    versions: dict[str, str] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)
    seconds: int = 0

    @property
    def name(self) -> str:
        return f"{self.only}-{self.python}"

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(each.startswith("passed") for each in self.checks.values())


class Environment:
    """The virtual environment of a case.

    Args:
        case: which one.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.folder = FOLDER / case.name
        self.bin = self.folder / "bin"

    def install(self) -> None:
        """Resolve and install all extras, and the package itself as editable."""
        interpreter = find_python(self.case.python)
        run([interpreter, "-m", "venv", "--clear", str(self.folder)])  # with pip, which some tests ask
        lock = self.folder / "requirements.txt"
        wheels = [part for name in ONLY_AS_SOURCE for part in ("--no-binary", name)]
        how = [
            "--resolution",
            RESOLUTIONS[self.case.only],
            "--only-binary",
            ":all:",
            *wheels,
            "--output-file",
            str(lock),
        ]
        here = ["--python", str(self.bin / "python")]
        run(uv("pip", "compile", "--quiet", "--no-annotate", "--all-extras", "pyproject.toml", *how, *here))
        run(uv("pip", "sync", "--quiet", *here, str(lock)))
        run(uv("pip", "install", "--quiet", "--no-deps", *here, "--editable", "."))
        locked = dict(line.split("==") for line in lock.read_text().splitlines() if re.match(r"[\w.-]+==", line))
        full = run([str(self.bin / "python"), "-c", "import platform; print(platform.python_version())"]).strip()
        self.case.versions = {"python": full} | {name: locked[name].split()[0] for name in SHOWN}

    def unit_tests(self) -> str:
        """Run the tests; warnings of old libraries do not count."""
        options = [
            "-q",
            "-n",
            "2",
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "-W",
            "ignore",
            "-p",
            "no:cacheprovider",
        ]
        servers = SERVERS if self.case.only == "lowest" else ()
        return self.run(
            "python", "-m", "pytest", *options, *(QUICK if self.case.quick else TESTS), *servers
        ).splitlines()[-1]

    def two_ranks(self) -> str:
        """Train a recipe on two emulated nodes."""
        self.train("trainer.max_epochs=1")
        return ""

    def resume(self) -> str:
        """Let the same command train one epoch more, from the checkpoint of the first."""
        said = self.train("trainer.max_epochs=2", "resume=any")
        if "Going on from" not in said:
            raise FailedError("the checkpoint was not restored")
        return ""

    def dry_run(self) -> str:
        """Render a job."""
        text = self.run("azureml-strategy", "submit", "resnet50_imagenet", "cluster=nd96amsr_a100_v4", "--dry-run")
        if "distribution:" not in text:
            raise FailedError("no job was printed")
        return ""

    def train(self, *overrides: str) -> str:
        """Train a few steps in the case's own folder, where a checkpoint of an earlier call may lie."""
        output = f"output_dir={self.folder / 'run'}"
        program = str(self.bin / "azureml-strategy")
        return self.run(
            "azureml-strategy",
            "emulate",
            "--nodes",
            "2",
            "--",
            program,
            "train",
            "resnet50_ddp",
            *SHORT,
            *overrides,
            output,
        )

    def run(self, program: str, *arguments: str) -> str:
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        environ = {
            **os.environ,
            "PATH": path,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(ROOT),  # for `tests`, from wherever a test starts a process
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # torch 2.8 starts processes when its compiler is imported
        }
        return run([str(self.bin / program), *arguments], environ, self.folder if program != "python" else ROOT)


# What a case must pass, by its name in the table.
CHECKS: dict[str, Callable[[Environment], str]] = {
    "unit tests": Environment.unit_tests,
    "two ranks": Environment.two_ranks,
    "resume": Environment.resume,
    "dry run": Environment.dry_run,
}


def uv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "uv", *arguments]


def run(command: list[str], environ: dict[str, str] | None = None, folder: Path = ROOT) -> str:
    """Return what a command prints.

    Raises:
        FailedError: it has failed; with the tests that did, or the last line.
    """
    log = FOLDER / f"{Path(command[0]).parent.parent.name}-{Path(command[0]).name}.log"
    with log.open("w") as file:
        code = subprocess.run(command, cwd=folder, env=environ, stdout=file, stderr=subprocess.STDOUT).returncode
    said = log.read_text()
    if code != 0:
        tests = re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", said, re.MULTILINE)
        lines = said.strip().splitlines() or [f"exit code {code}"]
        raise FailedError("; ".join(dict.fromkeys(tests)) or lines[-1])
    return said


def find_python(version: str) -> str:
    """Return the interpreter: of pyenv, or whichever uv finds.

    Raises:
        FailedError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    own = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    return str(own[-1]) if own else run(uv("python", "find", "--no-python-downloads", version)).splitlines()[-1]


def run_case(case: Case) -> None:
    """Install a case, and fill in what passed."""
    began = time.monotonic()
    environment = Environment(case)
    try:
        environment.install()
    except FailedError as error:
        case.checks["install"] = f"failed: {error}"
    else:
        for name, check in CHECKS.items():
            case.checks[name] = outcome(environment, check)
            print(f"{case.name}, {name}: {case.checks[name]}", flush=True)
    case.seconds = round(time.monotonic() - began)


def outcome(environment: Environment, check: Callable[[Environment], str]) -> str:
    try:
        said = check(environment)
    except FailedError as error:
        return f"failed: {error}"
    return f"passed: {said}" if said else "passed"


def table(cases: list[Case]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| | Python | " + " | ".join(SHOWN) + " | |"
    yield "|---" * (len(SHOWN) + 3) + "|"
    for case in cases:
        versions = [case.versions.get(name, "-") for name in ("python", *SHOWN)]
        failed = [f"{name}: {said}" for name, said in case.checks.items() if not said.startswith("passed")]
        passed = f"passed{' the quick tests' if case.quick else ''}, {case.date}"
        yield f"| {case.only} | {' | '.join(versions)} | {'; '.join(failed) or passed} |"


def read_results(path: Path = RESULTS) -> list[Case]:
    """Return the cases that were run last."""
    return [Case(**each) for each in json.loads(path.read_text())] if path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=RESOLUTIONS, nargs="*", default=[*RESOLUTIONS], help="lowest, highest")
    parser.add_argument("--python", nargs="*", default=[*PYTHONS], help="versions, such as 3.12")
    parser.add_argument("--quick", action="store_true", help="run fewer tests")
    parser.add_argument("--keep", action="store_true", help="leave the environments in .venv-versions")
    arguments = parser.parse_args()
    cases = [Case(only, python, arguments.quick) for python in arguments.python for only in arguments.only]
    FOLDER.mkdir(exist_ok=True)
    for case in cases:
        run_case(case)
        results = {each.name: each for each in (*read_results(), case)}
        RESULTS.write_text(json.dumps([asdict(results[name]) for name in sorted(results)], indent=1) + "\n")
        if not arguments.keep:
            shutil.rmtree(FOLDER / case.name, ignore_errors=True)
    print(*table(cases), sep="\n")
    return 0 if all(case.passed for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
