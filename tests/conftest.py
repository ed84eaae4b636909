"""What every test leaves behind is checked: environment variables, Python's path, processes, groups, signals."""

from __future__ import annotations

import gc
import logging
import multiprocessing.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from tests import (
    rota,
    times,
    uncollected,  # noqa: F401  # until all tests are imported
    workers,
)

# How long an example takes says something about the machine only. `make test` tries the same ones each time.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("the-same", settings.get_profile("random"), derandomize=True, max_examples=40)
settings.load_profile("the-same")

# Two ranks on two cores: one thread each is what a real run on this many cores would use. More would wait for one
# another in loops. Set here, as torch reads it once: `pytest tests/checkpoint` imports that folder's conftest.py, and
# thereby torch, before it calls `pytest_configure`.
if "torch" in sys.modules and "OMP_NUM_THREADS" not in os.environ:
    # Its parallel loops have threads then. A worker that is forked does not have them, and waits for them for ever.
    raise pytest.UsageError(
        "torch was imported before tests/conftest.py set OMP_NUM_THREADS. See what imports it above."
    )
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch's rendezvous store asks for the name of each process that connects, and serves nobody until it has the answer or
# has waited for five seconds, which is resolv.conf's default; a busy name server loses one question in a hundred.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A worker of a data loader that is forked from here does not collect what earlier tests have left: the end of one of
# gloo's process groups joins its threads, which a forked process does not have, and would wait for ever.
os.register_at_fork(after_in_child=gc.freeze)

# pytest and hypothesis write these themselves.
_OWN_VARIABLES = {"PYTEST_CURRENT_TEST", "COLUMNS", "LINES"}
# Set once for the process by a library at import or first use, harmless to a later test.
_LIBRARY_VARIABLES = {
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    # On GPUs, by torch when it first uses CUDA, compiles, or records CUDA graphs.
    *("CUDA_MODULE_LOADING", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH"),
    *("DISABLE_CUPTI_LAZY_REINIT", "TEARDOWN_CUPTI"),
}
# Set anew in each Trainer on GPUs, by Lightning. The next test starts without: a plan for NCCL keeps what it finds set.
_TAKEN_BACK = {"CUDA_DEVICE_ORDER"}
# A shell inside an Azure ML job or a Slurm allocation must not change what a test sees.
_JOB_PREFIXES = ("AZUREML_", "AZ_BATCH", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MLFLOW_", "TORCHELASTIC_", "AMLARC_")
# Settings that the plugin finds, keeps and tells of. GPUs may need a machine's own.
_NETWORK_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER")
# How a shell wants all programs to print, or Lightning to be seeded.
_OF_A_SHELL = ("FORCE_COLOR", "CLICOLOR_FORCE", "NO_COLOR", "TTY_COMPATIBLE", "PL_GLOBAL_SEED", "PL_SEED_WORKERS")
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--gpu", action="store_true", help="run the tests marked cuda, and only those, on this machine's GPUs"
    )
    for plugin in (workers, times, rota):
        pluginmanager.register(plugin)


@pytest.hookimpl(tryfirst=True)  # before fork servers and workers take over what is set here
def pytest_configure(config: pytest.Config) -> None:
    _use_scratch_folder(config)
    # The other tests are of CPUs, also where there are GPUs: two ranks would share one, and NCCL refuses that. All
    # processes that a test starts inherit it.
    prefixes = _JOB_PREFIXES
    if not config.getoption("--gpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        prefixes += _NETWORK_PREFIXES
    # A shell has its background jobs, and all that they start, ignore Ctrl-C; some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in list(os.environ):
        if name.startswith(prefixes) or name in _RANK_VARIABLES + _OF_A_SHELL:
            del os.environ[name]
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    # Making a page takes seconds of a process of its own; the tests of the page turn it on again.
    os.environ["AZUREML_STRATEGY_PAGE"] = "off"
    os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning"


def _use_scratch_folder(config: pytest.Config) -> None:
    """What tests and their programs leave in the folder for temporary files goes at the end; pytest's own stays."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder, before = tempfile.mkdtemp(prefix="tests-"), os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = folder, None

    def remove() -> None:
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # it has a folder of its own there
        shutil.rmtree(folder, ignore_errors=True)
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before

    config.add_cleanup(remove)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPUs are for the tests that ask for them."""
    if config.getoption("--gpu"):
        others = [item for item in items if item.get_closest_marker("cuda") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs more GPUs than there are."""
    marker = item.get_closest_marker("cuda")
    if marker is None:
        return
    needed = marker.kwargs.get("gpus", 1)
    if not item.config.getoption("--gpu"):
        pytest.skip(f"needs {needed} NVIDIA GPU(s), and `make test` hides them: see `make test-gpu`")
    import torch

    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} NVIDIA GPU(s), and {torch.cuda.device_count()} is here")


def pytest_collection_finish() -> None:
    """Python's garbage collector need not visit all libraries again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def nan_in_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have torch fill with NaN what it makes empty, here and in programs that are forked.

    What is saved, sent or read before it is written then shows. It is not for all tests, as ZeRO makes buffers of many
    megabytes in each step.
    """
    import torch
    from tests.preloaded import FRESH_MEMORY, fill_fresh_memory

    monkeypatch.setenv(FRESH_MEMORY, "nan")
    fill_fresh_memory()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _leaves_no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Fail a test that leaks variables, a folder on Python's path, child processes, a process group or a handler."""
    monkeypatch.chdir(tmp_path)
    environment, path = dict(os.environ), [*sys.path]
    handler = signal.getsignal(signal.SIGTERM)
    yield
    monkeypatch.undo()
    ignored = _OWN_VARIABLES | _LIBRARY_VARIABLES
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name not in ignored
    }
    for name in changed:  # the next test starts clean even when this one fails
        if name in environment:
            os.environ[name] = environment[name]
        else:
            del os.environ[name]
    # Processes that later tests start inherit it, and would find this test's modules before their own. Libraries may
    # put their own folders there when they are imported, as IPython does.
    added = [each for each in sys.path if each not in path and not each.startswith(sys.prefix)]
    sys.path[:] = [each for each in sys.path if each not in added]
    # A worker of torch's data loader that is slow to end is told to, and not waited for.
    ending = [child for child in map(_process, _descendants(os.getpid())) if child and _counts(child)]
    _, children = psutil.wait_procs(ending, timeout=10) if ending else ([], [])
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    programs = multiprocessing.active_children()  # of a fork server: see tests/preloaded.py
    for program in programs:
        program.kill()
        program.join()
    group = _destroy_process_group()
    kept = _what_keeps_from_compiling()
    _be_rank_zero_again()
    sigterm, _ = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGTERM, handler)
    changed -= _TAKEN_BACK
    assert not changed, f"environment variables changed by the test: {sorted(changed)}"
    assert not added, f"folders left on Python's path by the test: {added}"
    assert not children, f"processes left behind by the test: {children}"
    assert not programs, f"programs left behind by the test: {programs}"
    assert not group, "the test left a torch.distributed process group behind"
    assert sigterm == handler, "the test left a SIGTERM handler behind"
    assert not kept, f"left by the test, and torch.compile compiles nothing from now on: {kept}"


@pytest.fixture(autouse=True)
def _as_the_process_was() -> Iterator[None]:
    """Take back what is changed for the whole process: where a run logs to, DeepSpeed's `linear`, a server's stance."""
    names = [
        "",
        *(("lightning", "lightning.pytorch", "lightning.fabric") if "lightning.pytorch" in sys.modules else ()),
    ]
    before = [(logger, logger.handlers[:], logger.level) for logger in map(logging.getLogger, names)]
    yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
    zero = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    own = zero and getattr(zero.InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if own:
        sys.modules["torch.nn.functional"].linear = own  # type: ignore[attr-defined]
    if "torch._dynamo" in sys.modules:  # a server compiles nothing
        sys.modules["torch"].compiler.set_stance("default")


def _descendants(pid: int) -> Iterator[int]:
    """As psutil's `children(recursive=True)`, which reads all processes of the machine, and that after each test."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread or the process has ended
            for child in map(int, file.read_text().split()):
                yield child
                yield from _descendants(child)


def _process(pid: int) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid)
    return None


def _counts(child: psutil.Process) -> bool:
    """Whether a live child is the test's: multiprocessing's trackers and the servers of several tests outlive it."""
    others = ("resource_tracker", "forkserver", "azurite", "azmlinfsrv")
    try:
        command = " ".join(child.cmdline())
        return child.is_running() and not any(name in command for name in others)
    except psutil.NoSuchProcess:
        return False


def _be_rank_zero_again() -> None:
    """A Trainer tells its rank to the whole process, and a later test's logger would be silent."""
    rank_zero = sys.modules.get("lightning_utilities.core.rank_zero")
    if rank_zero is not None:
        rank_zero.rank_zero_only.rank = 0


def _destroy_process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    distributed.destroy_process_group()
    return True


def _what_keeps_from_compiling() -> str:
    """What torch has for the whole process, and looks at in silence. A later test's torch.compile would do nothing."""
    if "torch" not in sys.modules:
        return ""
    from torch import _C
    from torch._C import _len_torch_dispatch_stack
    from torch.utils import _python_dispatch

    dynamo = sys.modules.get("torch._dynamo")
    found = []
    if _python_dispatch._is_in_any_mode_without_ignore_compile_internals or _len_torch_dispatch_stack():
        found.append("a dispatch mode")
    if _C._is_torch_function_mode_enabled() and _C._len_torch_function_stack():
        found.append("a function mode")
    if dynamo is not None and dynamo.config.disable:
        found.append("torch._dynamo.config.disable")
    return ", ".join(found)
