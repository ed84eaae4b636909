"""Python programs forked from a process that has imported torch and Lightning: an import takes seconds, a fork none.

Each is a process of its own with its own variables, folder, group and output, as if a shell had started it. What it
does not have is a command line that the kernel knows (`/proc/self/cmdline`), and its imports are in no order: a test
that is about these starts an interpreter.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from itertools import chain, takewhile
from multiprocessing import forkserver
from multiprocessing.connection import arbitrary_address
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import ModuleType
from typing import IO, Any

from tests import empty_store

from azureml_strategy.cluster import environ as cluster_environ
from azureml_strategy.emulator import processes

_IMPORTED_ONCE = [
    "tests.uncollected",
    *("torch", "torch._dynamo", "torch.distributed.checkpoint", "lightning.pytorch", "hydra", "omegaconf"),
    *("mlflow", "mlflow.store.tracking.sqlalchemy_store", "git"),
    # DeepSpeed's engine imports these when it starts, which takes longer than many a test's training.
    *("tests.deepspeed_on_cpu", "torch._inductor.compile_fx", "networkx"),
    # What each training of a Hugging Face model begins with.
    "transformers.modeling_utils",
    # What every training of ours begins with.
    *("azureml_strategy.strategies.ddp", "azureml_strategy.strategies.model_parallel.strategy"),
    *("azureml_strategy.strategies.zero.strategy", "azureml_strategy.strategies.local_sgd.strategy"),
    *("azureml_strategy.tracking.job_tracking", "azureml_strategy.hang_detection.callback"),
    *("azureml_strategy.profiling.callback", "azureml_strategy.strategies.replica_check.callback"),
    *("azureml_strategy.preemption.termination", "azureml_strategy.tracking.run_page"),
    *("azureml_strategy.checkpoint.job_checkpoint", "azureml_strategy.models.classifier"),
    *("azureml_strategy.training.app", "azureml_strategy.training.run"),
    # MLflow's, when a run begins.
    *("IPython", "sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.mssql", "sqlalchemy.dialects.mysql"),
]
_start_interpreter = processes._start
# A program that has this variable begins with `fill_fresh_memory`.
FRESH_MEMORY = "TESTS_FRESH_MEMORY"
# All threads' stacks are written to the errors; even while the interpreter's lock is held.
_TELL_STACKS = signal.SIGUSR2


class Forked:
    """A running program, with what these tests use of `subprocess.Popen`; errors are in its output.

    Args:
        command: a Python script and its arguments, see `script_of`.
        environ: all its variables.
        text: whether `stdout` gives strings.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], text: bool = False) -> None:
        reader, writer = os.pipe()
        self._process = _fork(command, environ, os.getcwd(), writer)
        os.close(writer)
        self.stdout: IO[Any] = os.fdopen(reader, "r" if text else "rb")
        with suppress(ProcessLookupError):  # it has ended
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self, timeout: float) -> tuple[Any, None]:
        output: list[Any] = []
        reader = threading.Thread(target=lambda: output.append(self.stdout.read()), daemon=True)
        reader.start()
        try:
            self.wait(timeout)
        except TimeoutExpired as too_long:
            reader.join(10)
            raise AssertionError(f"It did not end within {timeout} s: {output}") from too_long
        reader.join(60)
        assert output, "It has ended, but something it started still holds its output."
        return output[0], None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; one that takes longer says where it and the processes it started are, and is killed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            os.killpg(self.pid, _TELL_STACKS)
            self._process.join(1)
            os.killpg(self.pid, signal.SIGKILL)
            raise TimeoutExpired(str(self.pid), timeout or 0)
        return self._process.exitcode


class _OfAScript:
    """A script that a script starts, as a strategy or torchrun does: with its output, and in its group or a new one."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str | None = None, start_new_session: bool = False
    ) -> None:
        group = 0 if start_new_session else os.getpgrp()
        self._process = _fork(command, env, cwd or os.getcwd(), sys.stdout.fileno(), group)
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]  # nobody waits at the end
        self.pid, self.kill, self.terminate = self._process.pid, self._process.kill, self._process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutExpired(str(self.pid), timeout or 0)
        return self._process.exitcode


class _Popen(subprocess.Popen[Any]):
    """Forks a Python script that is given nothing but variables, a folder, or a session of its own."""

    def __new__(cls, args: Any, *others: Any, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if value is not None}
        bare = "env" in given and given.keys() <= {"env", "cwd", "start_new_session"}
        command = script_of(args, given["env"]) if bare else None
        return super().__new__(cls) if command is None else _OfAScript(command, **given)


def _fork(command: Sequence[str], environ: Mapping[str, str], folder: str, output: int, group: int = 0) -> Any:
    """The process that runs a script; the leader of a process group, or one of another's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    forkserver.ensure_running()
    server = forkserver._forkserver._forkserver_address
    arguments = (list(command), dict(environ), folder, _Inherited(output), server, group)
    process = context.Process(target=_run_script, args=arguments)
    # multiprocessing has a child import its parent's program, which may be a script that knows nothing of it
    program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    process.start()
    sys.modules["__main__"] = program
    return process


def _use(address: str, alive: int | None) -> None:
    """Have this process's programs forked by a server that another process has started."""
    ours: Any = forkserver._forkserver
    ours._forkserver_address, ours._forkserver_alive_fd = address, alive
    ours.ensure_running = forkserver.ensure_running = lambda: None


@dataclass(frozen=True)
class Server:
    """A fork server of one worker's own: what its programs take is then known.

    Args:
        alive: the end of a pipe; the server ends when nobody has it open.
    """

    pid: int
    address: str
    alive: int

    def use(self) -> None:
        """Have this process's programs forked there."""
        _use(self.address, self.alive)


class Servers:
    """Fork servers that import once: one interpreter does, and is then forked itself.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._listeners = [socket.socket(socket.AF_UNIX) for _ in range(count)]
        for listener in self._listeners:
            listener.bind(arbitrary_address("AF_UNIX"))
            listener.listen()
        pipes = [os.pipe() for _ in range(count)]
        self._reader, writer = os.pipe()
        self._alive, self._pids = [alive for _, alive in pipes], list[int]()
        ends = [(listener.fileno(), end) for listener, (end, _) in zip(self._listeners, pipes, strict=True)]
        program = f"import sys; sys.path[:] = {sys.path}; from tests.preloaded import serve; serve({ends}, {writer})"
        self._root = subprocess.Popen([sys.executable, "-c", program], pass_fds=[writer, *chain.from_iterable(ends)])
        for end in [writer, *(end for _, end in ends)]:
            os.close(end)

    def ready(self) -> list[Server]:
        """The servers, as soon as they have imported."""
        with os.fdopen(self._reader) as told:
            pids = [int(line) for line in told]
        assert len(pids) == len(self._alive), "the fork servers did not start: their errors are above"
        self._pids = pids
        addresses = [str(listener.getsockname()) for listener in self._listeners]
        return [Server(*each) for each in zip(pids, addresses, self._alive, strict=True)]

    def close(self) -> None:
        """End them: a program that a test left behind may have their pipes open still."""
        for alive in self._alive:
            os.close(alive)
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for listener in self._listeners:
            os.unlink(listener.getsockname())
            listener.close()
        self._root.wait(60)


def serve(ends: Sequence[tuple[int, int]], told: int) -> None:
    """The program of the fork servers; each has a listening socket, and a pipe that is closed when it is to end."""
    for name in _IMPORTED_ONCE:
        import_module(name)
    # Torch's libraries would take back what they registered, and copy 40 MB of shared memory, as each program ends.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    empty_store.make()
    pids = []
    for listener, alive in ends:
        pid = os.fork()
        if not pid:
            os.close(told)
            with suppress(SystemExit):
                forkserver.main(listener, alive, [])
            os._exit(0)
        pids.append(pid)
    os.write(told, "".join(f"{pid}\n" for pid in pids).encode())
    os.close(told)
    for pid in pids:
        os.waitpid(pid, 0)


class _Inherited:
    """A file descriptor that the forked process gets as well."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (DupFd(self._descriptor),)


def _detach(duplicate: Any) -> int:
    return int(duplicate.detach())


def run_forked(command: Sequence[str], environ: Mapping[str, str], timeout: float) -> CompletedProcess[str]:
    """Run a Python script to its end; its output and its errors in one."""
    forked = Forked(command, environ, text=True)
    output, _ = forked.communicate(timeout)
    assert forked.returncode is not None
    return CompletedProcess(command, forked.returncode, output)


def start_forked(process: processes.Process) -> processes._Running:
    """In place of the emulator's own start; what is no Python script starts as ever."""
    command, environ = process.command, dict(process.environ)
    if command[0] == "env":
        given = list(takewhile(lambda part: "=" in part, command[1:]))
        command = command[1 + len(given) :]
        environ.update(part.split("=", 1) for part in given)
    script = script_of(command, environ)
    if script is None:
        return _start_interpreter(process)
    return processes._Running(process, Forked(script, environ))  # type: ignore[arg-type]


def script_of(command: Sequence[str], environ: Mapping[str, str]) -> list[str] | None:
    """Script and arguments of `python SCRIPT ...` or of an installed command; None for anything else."""
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        return None
    if Path(program).name.startswith("python"):
        arguments = list(command[2:] if command[1] == "-u" else command[1:])  # our output is written by line as it is
        return arguments if Path(arguments[0]).is_file() else None
    with open(program, "rb") as file:
        return [program, *command[1:]] if b"python" in file.readline() else None


def _run_script(
    command: Sequence[str], environ: Mapping[str, str], folder: str, output: int, server: str, group: int
) -> None:
    """What `python SCRIPT ARGUMENTS` does, in a process that is running already."""
    os.setpgid(0, group)
    os.chdir(folder)
    # Not as this process was started: workers of its data loaders are to be its children, and to end when it is killed.
    multiprocessing.set_start_method(None, force=True)
    _set_environ(environ)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.register(_TELL_STACKS)
    gc.freeze()  # a collection would visit, and thereby copy, all memory that is shared with the server
    gc.enable()  # see tests/uncollected.py
    _share(server)
    if FRESH_MEMORY in os.environ:
        fill_fresh_memory()
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        # multiprocessing leaves by os._exit and would skip what the interpreter does at its end
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def fill_fresh_memory() -> None:
    """Have torch fill with NaN what it makes empty: what is saved, sent or read before it is written then shows."""
    sys.modules["torch"].use_deterministic_algorithms(True, warn_only=True)  # type: ignore[attr-defined]


def _set_environ(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in environ else []
    warnings.resetwarnings()
    warnings._processoptions(environ.get("PYTHONWARNINGS", "").split(","))  # type: ignore[attr-defined]
    # The kernel keeps the variables a process was started with, and we read some back; here a file in memory does.
    memory = os.memfd_create("environ")
    os.write(memory, b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))
    cluster_environ._INITIAL_ENVIRON = f"/proc/self/fd/{memory}"


def _share(server: str) -> None:
    """An emulated job's ranks come from the same server as the emulator."""
    _use(server, forkserver._forkserver._forkserver_alive_fd)
    processes._start = start_forked
    subprocess.Popen = _Popen  # type: ignore[misc]
