"""Records the counters of every node (processors, memory, disks, network, GPUs), and warns of what is wrong there."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.control.channel import StoreLostError
from azureml_strategy.control.gather import SharedStore, open_shared_store
from azureml_strategy.control.messages import from_json, to_json
from azureml_strategy.control.store import ControlStore
from azureml_strategy.lightning_internals import logged_step
from azureml_strategy.tracking.events import record_event
from azureml_strategy.tracking.node_sampler import CHECKPOINT_DISK, INSTALL, NodeSampler

log = logging.getLogger(__name__)

THREAD = "node-counters"
# The first sample comes soon, so that a short run has one too.
_FIRST_S = 1.0
# How long one call of the store may take, and how long the end of `fit` waits for a sample that has begun.
_STORE_S, _END_S = 5.0, 2.0


class NodeCounters(Callback):
    """Records each node's load, memory, disks, network and GPUs while training runs, and warns of hardware at fault.

    Local rank 0 of each node takes a sample every `interval_s` seconds on a thread of its own. Other nodes send theirs
    through the rendezvous store to rank 0. The training thread of rank 0 logs them, at the end of its next batch, at
    the step of the other metrics: loggers are not made for several threads, and some are confused by steps that go
    back. A batch that takes longer than the interval has the figures of the last sample.

    The names are those of MLflow's system metrics, `system/cpu_utilization_percentage`, and further ones in its style;
    on several nodes `system/node_1/cpu_utilization_percentage`. docs/tracking.md lists them.

    A warning says which node it is and what to do: an InfiniBand port that counts errors or loses its link, a GPU that
    is throttled or has memory errors, a disk of checkpoints that is nearly full. Each is said once for a cause and
    node, on the console at once, and kept with the run's events.

    It needs `azureml-strategy[counters]`; without it, it says so and does nothing. All ranks must have the callback.

    Args:
        interval_s: seconds between two samples of a node.
        sysfs: mount point of sysfs.
    """

    def __init__(self, interval_s: float = 10.0, sysfs: str | Path = "/sys") -> None:
        super().__init__()
        if interval_s <= 0:
            raise ValueError(
                f"interval_s={interval_s} is no time; give seconds, such as 10, or leave NodeCounters out."
            )
        self.interval_s = interval_s
        self.sysfs = sysfs
        self._thread: _CounterThread | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()  # of a previous run that failed in a way that calls no hook
        store = None
        if trainer.num_nodes > 1 and dist.is_available() and dist.is_initialized():
            ranks = trainer.global_rank, trainer.world_size
            shared: SharedStore[None] = open_shared_store("NodeCounters", *ranks, None, _STORE_S)
            store = shared.store
            if store is None:
                rank_zero_info(
                    "Counters of the first node alone are recorded: there is no connection to the rendezvous store."
                )
        if trainer.local_rank == 0:
            self._thread = _CounterThread(trainer, self.interval_s, self.sysfs, store)
        elif store is not None:
            store.close()

    def _log(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        thread = self._thread
        if thread is None or not (thread.figures or thread.warnings):
            return
        figures = thread.take()
        for logger in trainer.loggers if figures else []:
            logger.log_metrics(figures, step=logged_step(trainer))
        while thread.warnings:
            record_event(trainer, "warning", thread.warnings.popleft())

    on_train_batch_end = on_validation_batch_end = on_train_end = _log

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self._log(trainer)
        finally:
            self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_thread": None}  # a thread cannot be copied


class _CounterThread:
    """Samples this node. On rank 0 it collects the samples of all nodes; on other ranks it sends its own there.

    The store, which the ranks share, is closed with the thread. It is None for one node, or without a connection.

    Attributes:
        figures: the newest ones of each node, until the training thread of rank 0 takes them.
        warnings: those that the training thread of rank 0 has not recorded yet.
    """

    def __init__(self, trainer: Trainer, interval_s: float, sysfs: str | Path, store: ControlStore | None) -> None:
        # Two threads use these two without a lock, which a fork could leave locked. So only calls that the interpreter
        # does not interrupt are made on them.
        self.figures: dict[str, dict[str, float]] = {}
        self.warnings: deque[str] = deque()
        self._trainer = trainer
        self._interval_s = interval_s
        self._sysfs = sysfs
        self._store = store
        self._is_collector = trainer.is_global_zero
        self._multi_node = trainer.num_nodes > 1
        self._node = f"node_{trainer.node_rank}"
        self._others = [f"node_{node}" for node in range(trainer.num_nodes) if node != trainer.node_rank]
        self._causes: dict[tuple[str, str], str] = {}
        self._last_sample: dict[str, int] = {}
        self._samples = 0
        self._ending = threading.Event()
        self._running = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._running.start()

    def take(self) -> dict[str, float]:
        """Return the new figures of all nodes, by their full names."""
        found: dict[str, float] = {}
        while self.figures:
            node, figures = self.figures.popitem()
            prefix = f"system/{node}" if self._multi_node else "system"
            found |= {f"{prefix}/{name}": value for name, value in figures.items()}
        return found

    def close(self) -> None:
        """End the thread. If it waits for a disk or a driver that does not answer, it ends later."""
        self._ending.set()
        self._running.join(_END_S)
        if self._store is not None:
            self._store.close()

    def _run(self) -> None:
        try:
            with closing(NodeSampler(self._warn, self._checkpoint_folder, self._sysfs)) as sampler:
                pause = min(_FIRST_S, self._interval_s)
                while not self._ending.wait(pause):
                    self._publish(sampler.sample())
                    pause = self._interval_s
        except ImportError as error:
            rank_zero_info(f"Counters of the nodes are not recorded ({error}): {INSTALL}.")
        except Exception as error:  # whatever it is, training goes on
            text = redact_text(f"{type(error).__name__}: {error}")
            rank_zero_info(f"Counters of the nodes are recorded no more, training goes on: {text}")

    def _publish(self, figures: dict[str, float]) -> None:
        self._samples += 1
        if self._is_collector:
            self.figures[self._node] = figures
        if self._store is None:
            return
        try:
            if self._is_collector:
                self._collect(self._store)
            else:
                warnings = {cause: text for (_, cause), text in self._causes.items()}
                self._store.set(self._node, to_json([self._samples, figures, warnings]))
        except StoreLostError as error:
            log.debug("Counters of %s: %s", self._node, error)

    def _collect(self, store: ControlStore) -> None:
        for node, text in store.get_all(self._others).items():
            if text is None:
                continue
            sample, figures, warnings = from_json(text)
            if sample == self._last_sample.get(node):
                continue
            self._last_sample[node] = sample
            self.figures[node] = figures
            self._add_warnings(node, warnings)

    def _warn(self, cause: str, text: str) -> None:
        """Record what is wrong with this node."""
        host = socket.gethostname()
        where = f"{host} ({self._node})" if self._multi_node else host
        warning = redact_text(f"Node {where}: {text}")
        if self._is_collector:
            self._add_warnings(self._node, {cause: warning})
        else:
            self._causes.setdefault((self._node, cause), warning)

    def _add_warnings(self, node: str, warnings: Mapping[str, str]) -> None:
        for cause, text in warnings.items():
            # All nodes usually write checkpoints to one disk, so its cause counts once for all of them.
            key = ("" if cause == CHECKPOINT_DISK else node, cause)
            if key not in self._causes:
                self._causes[key] = text
                # On the console at once, because the fault may be why training waits and logs no more.
                log.warning(text)
                self.warnings.append(text)

    def _checkpoint_folder(self) -> Path | None:
        saver = self._trainer.checkpoint_callback
        folder = saver.dirpath if isinstance(saver, ModelCheckpoint) else None
        return Path(folder).absolute() if folder and "://" not in str(folder) else None
