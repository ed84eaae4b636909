"""Compiled code that outlives the node: kept with the job's output, and loaded before the next attempt compiles."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from azureml_strategy.checkpoint.fit_resume import default_folder
from azureml_strategy.cluster.environ import COMPILE_CACHE_SWITCH
from azureml_strategy.cluster.isolation import CapturedResult, IsolatedCallback, fault_text, isolated, not_isolated
from azureml_strategy.control.gather import gather
from azureml_strategy.files import OutsideError
from azureml_strategy.strategies.compilation.cache_file import (
    FOLDER,
    UnfitError,
    compiled_files,
    conditions,
    newest,
    read_cache,
    write_cache,
)

log = logging.getLogger(__name__)

# Torch's compiler keeps its results there: https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
# A fit that ends waits for so long for the file, which the next attempt may need.
_LAST_WAIT_SECONDS = 30.0
_PREFIX = "azureml_strategy_compiled_"
# What a process that was killed has left is removed after a day. Until then, its ranks may be about to use it.
_OLD_SECONDS = 86_400.0
# The folder that this process has made, or learned of, in place of torch's own.
_own_folders: set[str] = set()


class CompileCache(IsolatedCallback):
    """Keeps what torch has compiled in a fit, so that the job's next attempt compiles nothing.

    In a job every Trainer has this callback, and it serves whatever calls `torch.compile`. The first rank of each node
    writes `compile_cache/nodeN.bin` into the job's output `run`, or the Trainer's `default_root_dir`. It looks for
    new code after batch 1, 2, 4, 8 and so on, and after a validation, and writes on a thread. Where nothing was
    compiled it writes nothing.

    The ranks of a node compile into one folder of their own on the node's disk, which ends with them; into that of
    TORCHINDUCTOR_CACHE_DIR if you have set it.
    """

    switch = COMPILE_CACHE_SWITCH

    def __init__(self) -> None:
        self._folder = Path()
        self._file: Path | None = None  # None where this rank writes nothing
        self._kept: frozenset[str] = frozenset()
        self._batches = 0
        self._thread: threading.Thread | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._file, self._batches = None, 0
        # The other ranks of the node must not compile before the first has loaded what there is.
        opened = CapturedResult(lambda: self._open(trainer) if trainer.local_rank == 0 else None)
        own = (trainer.node_rank, opened.value)
        gathered = gather(own) if trainer.world_size > 1 else [own]  # a script may train on one rank alone
        folder = next((each for node, each in gathered if node == trainer.node_rank and each is not None), None)
        if folder is not None:
            _use(*folder)
        opened.reraise()

    @not_isolated
    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._file is not None and self._batches & (self._batches - 1) == 0:  # a power of two
            self._keep(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._keep(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        thread, self._file = self._thread, None
        if thread is not None:
            thread.join(_LAST_WAIT_SECONDS)
        self._thread = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._file = self._thread = None  # there may be no time left: what is not written now never is

    def _open(self, trainer: Trainer) -> tuple[str, bool] | None:
        """Load what an earlier attempt has kept; return the folder for compiled code, and whether it is our own."""
        given = os.environ.get(VARIABLE, "")
        # Torch sets it as it is imported, to a folder whose name anybody can guess, and in which other jobs compile.
        if given.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir

            given = "" if given == os.path.abspath(default_cache_dir()) else given
        try:
            _remove_old_folders()
            folder = given or tempfile.mkdtemp(prefix=_PREFIX)
        except OSError as error:
            log.warning("There is no folder for compiled code (%s), so none is loaded and none is kept.", error)
            return None
        self._folder, self._kept = Path(folder), frozenset()
        if "://" not in trainer.default_root_dir:
            kept = default_folder(trainer.default_root_dir).with_name(FOLDER)
            self._file = kept / f"node{trainer.node_rank}.bin"
            self._load(trainer)
        return folder, not given or given in _own_folders

    def _load(self, trainer: Trainer) -> None:
        """Read this node's file; rank 0's node's if the job has more nodes than before, which compile the same."""
        assert self._file is not None
        found = next((each for each in (self._file, self._file.with_name("node0.bin")) if each.exists()), None)
        if found is None:
            return
        try:
            self._kept = frozenset(read_cache(found, self._folder, conditions(trainer.strategy.root_device)))
        except OutsideError as error:
            self._file = None
            log.warning(
                "The compiled code in it is not loaded, as it would run with your rights, and none is written: %s. "
                "Remove it, or make it yours alone by chmod 700; %s=off keeps no compiled code.",
                *(error, self.switch),
            )
        except UnfitError as error:
            log.warning("%s is not loaded, and will be replaced: %s. What is needed is compiled again.", found, error)
        except OSError as error:
            log.warning("%s cannot be loaded (%s). What is needed is compiled again.", found, error.strerror or error)
        else:
            rank_zero_info(f"Loaded the compiled code of an earlier attempt: {len(self._kept)} files of {found}.")

    @isolated
    def _keep(self, trainer: Trainer) -> None:
        """Write the file on a thread if there may be new code."""
        busy = self._thread is not None and self._thread.is_alive()
        if self._file is None or busy or not _has_entries(self._folder):
            return
        work = partial(self._write, self._file, trainer)
        self._thread = threading.Thread(target=work, name="compile-cache-writer", daemon=True)
        self._thread.start()

    def _write(self, file: Path, trainer: Trainer) -> None:
        try:
            files = compiled_files(self._folder)
            names = newest(files)
            if not self._kept.issuperset(names):
                size = write_cache(file, self._folder, names, conditions(trainer.strategy.root_device))
                self._kept = frozenset(names)
                log.info("Kept %d of %d files of compiled code in %s, %d bytes.", len(names), len(files), file, size)
            return
        except (OSError, OutsideError) as error:
            log.warning(
                "The compiled code cannot be kept in %s (%s). Training goes on; the job's next attempt compiles again.",
                *(file, getattr(error, "strerror", None) or error),
            )
        except Exception as fault:  # in a thread it would go unnoticed
            log.warning(fault_text(f"{type(self).__name__}", self.switch, fault))
        self._file = None


def _has_entries(folder: Path) -> bool:
    """Whether there is anything in a folder; not in one that is not there."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except FileNotFoundError:
        return False


def _remove_old_folders() -> None:
    """Remove the folders that processes of this user have left as they were killed."""
    for each in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another job removes it as well, or it is another user's
            if time.time() - each.lstat().st_mtime > _OLD_SECONDS:
                folder = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                _let_go(str(each), folder, os.getpid())
                os.close(folder)


def _use(folder: str, own: bool) -> None:
    """Have this process compile into a folder. Of the processes that use our own, the last removes it as it ends."""
    if not own:
        os.environ.setdefault(VARIABLE, folder)
    if not own or folder in _own_folders:
        return
    os.environ[VARIABLE] = folder
    _own_folders.add(folder)
    # The kernel gives the lock back even if the process is killed.
    shared = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(shared, fcntl.LOCK_SH)
    atexit.register(_let_go, folder, shared, os.getpid())


def _let_go(folder: str, shared: int, process: int) -> None:
    if os.getpid() != process:  # a fork, which has inherited this
        return
    with suppress(BlockingIOError):
        fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
