"""Starts the processes of the parts, as many at once as there are cores, each within its time."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil
from tests.emulated import SHARED_MACHINE, free_port, launches, loopback_addresses

from azureml_strategy.cluster.emulated import EmulatedRun, azure_variables, without_job_variables

ROOT = Path(__file__).parents[2]
_NAME = "azureml-strategy"
# A process for each case is enough; Inductor would start as many again as there are cores, in each.
_QUIET = {"AZUREML_STRATEGY_PAGE": "off", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
# cuBLAS is deterministic with it: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@cache
def program() -> tuple[str, str]:
    """This Python and the file of the command line, by which strategies and `emulate` start further processes.

    It lies beside Python, or in the folder `bin` of the folder that wheels were unpacked to, or on PATH.

    Raises:
        FileNotFoundError: it is in none of them.
    """
    folders = [Path(sys.executable).parent, *(Path(entry).absolute() / "bin" for entry in sys.path)]
    found = shutil.which(_NAME, path=os.pathsep.join(map(str, folders))) or shutil.which(_NAME)
    if found is None:
        raise FileNotFoundError(
            f"The program {_NAME} is neither beside {sys.executable}, nor in the folder bin of an entry of PYTHONPATH, "
            "nor on PATH. Install the project: pip install -e '.[dev]', or pip install --target FOLDER its wheel and "
            "PYTHONPATH=FOLDER."
        )
    return sys.executable, os.path.abspath(found)


def absolute(path: str) -> list[str]:
    """The entries of a PYTHONPATH as a process in another folder needs them."""
    return [os.path.abspath(entry) for entry in path.split(os.pathsep) if entry]


@dataclass(frozen=True)
class Row:
    """What one case of a part came to.

    Attributes:
        part: of the command.
        case: in the part.
        status: `ok`, `WRONG`, `refused` as it should be, or `left out`.
        words: a figure, what is wrong, or why it was left out.
    """

    part: str
    case: str
    status: str
    words: str


@dataclass(frozen=True)
class Ended:
    """How the processes of a job ended: their exit codes, what they printed, and whether they had to be ended."""

    codes: tuple[int | None, ...]
    output: str
    late: bool

    @property
    def failure(self) -> str:
        """Why it failed, in a line; empty if it did not."""
        # One whose child was killed first may have ended with 0 before its own turn came.
        if not self.late and not any(code != 0 for code in self.codes):
            return ""
        said = [line for line in self.output.splitlines() if line.strip()]
        errors = [line.strip() for line in said if "Error" in line] or said
        how = "it took too long" if self.late else f"exit codes {self.codes}"
        return f"{how}: {errors[-1][:300] if errors else 'nothing was printed'}"


@dataclass
class Machine:
    """Where the parts run.

    Args:
        accelerator: `cuda`, or `cpu` to try the command without a GPU.
        folder: for what they write.
        deadline: on the monotonic clock; what runs then is ended.
        cores: how many processes run at once.
        gpus: the visible ones, as in CUDA_VISIBLE_DEVICES; all parts but the tests see the first alone.
    """

    accelerator: str
    folder: Path
    deadline: float
    cores: int
    gpus: str
    _free: int = field(init=False)
    _changed: threading.Condition = field(init=False, default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._free = self.cores
        self._stopped = False

    def stop(self) -> None:
        """End what runs, and start nothing more. A handler of signals may call it."""
        self._stopped = True

    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._stopped or time.monotonic() >= self.deadline

    def run(
        self,
        name: str,
        command: Sequence[str],
        world: int = 1,
        limit_s: float = 120.0,
        extra: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run a command as each process of a job of one-process nodes, and wait for its end.

        Args:
            name: of its folder, in which it runs.
            command: the same for each rank.
            world: number of ranks.
            limit_s: seconds after which it is ended.
            extra: further variables.
        """
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        with self._cores(world):
            if self.is_over():
                return Ended((None,) * world, "the time was over before it could start", True)
            processes = [
                self._start(folder, command, environ) for environ in self._environs(folder, world, extra or {})
            ]
            limit_s = limit_s if self.accelerator == "cuda" else math.inf  # nobody knows how slow a CPU is
            until = time.monotonic() + limit_s
            late = _wait(processes, lambda: self.is_over() or time.monotonic() >= until)
        outputs = [(folder / f"{rank}.log").read_text(errors="replace") for rank in range(world)]
        return Ended(tuple(process.poll() for process in processes), "\n".join(outputs), late)

    @contextmanager
    def _cores(self, count: int) -> Iterator[None]:
        count = min(count, self.cores)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()

    def _environs(self, folder: Path, world: int, extra: Mapping[str, str]) -> Iterator[dict[str, str]]:
        addresses, port = loopback_addresses(world), free_port()
        shared = {**without_job_variables(os.environ), **SHARED_MACHINE, **_QUIET}
        shared["PYTHONPATH"] = os.pathsep.join([str(ROOT), *absolute(os.environ.get("PYTHONPATH", ""))])
        shared["CUDA_VISIBLE_DEVICES"] = "" if self.accelerator == "cpu" else self.gpus.split(",")[0]
        shared |= extra
        run = EmulatedRun("job-1", "tests", "1", f"sqlite:///{folder}/mlflow.db")
        for launch in launches(addresses, 1, port):
            yield shared | (azure_variables(launch, "pytorch", addresses, run) if world > 1 else {})

    def _start(self, folder: Path, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (folder / f"{environ.get('RANK', '0')}.log").open("ab") as log:
            return subprocess.Popen(
                command, env=environ, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )


def _wait(processes: Sequence[subprocess.Popen[bytes]], is_over: Callable[[], bool]) -> bool:
    """Wait for all; once one has failed, the others have a few seconds. What still runs is ended with its children.

    Returns:
        Whether the time was over.
    """
    others_until = math.inf
    while any(process.poll() is None for process in processes) and not is_over() and time.monotonic() < others_until:
        if others_until == math.inf and any(process.poll() for process in processes):
            others_until = time.monotonic() + 5
        time.sleep(0.05)
    running = [process for process in processes if process.poll() is None]
    for process in running:
        end_tree(process)
    return bool(running) and others_until == math.inf


def end_tree(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """End a process that still runs, and all that it has started: they would share the GPU with what comes next.

    They may be in sessions of their own, so that no signal to its group reaches them.

    Args:
        process: a child of this one.
        grace_s: seconds between SIGTERM to the process and SIGKILL to all; 0 for the latter alone.
    """
    if process.poll() is not None:
        return
    family = _family(psutil.Process(process.pid))
    try:
        if grace_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    finally:  # also at a second Ctrl-C
        for each in {descendant for one in family for descendant in _family(one)}:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _family(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []
