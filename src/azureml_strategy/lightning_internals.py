"""Every private name of Lightning that this package uses, where Lightning has no public way.

`INTERNALS` says what for. Other files get the names from here, as functions and classes, except for those that a
subclass uses on itself. `tests/test_internals.py` checks all of them on the oldest and newest Lightning allowed.
"""

from __future__ import annotations

import atexit
import inspect
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric, wrappers
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.fabric.strategies import model_parallel
from lightning.fabric.utilities import distributed, imports, types
from lightning.fabric.utilities import logger as fabric_logger
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core import optimizer as core_optimizer
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loops import fetchers, loop
from lightning.pytorch.overrides import distributed as ddp_overrides
from lightning.pytorch.strategies import DDPStrategy, Strategy
from lightning.pytorch.strategies.launchers import multiprocessing, subprocess_script
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors import data_connector, signal_connector
from lightning.pytorch.trainer.connectors.logger_connector import logger_connector, result
from lightning.pytorch.utilities import combined_loader
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

INTERNALS: dict[str, dict[str, str]] = {
    # The place within an epoch. Of it, Lightning's checkpoint has the number of the batch, and a loader's own state.
    "lightning.fabric.utilities.types": {
        "_Stateful": "how Lightning tells whether a loader knows its place",
    },
    "lightning.pytorch.loops.loop": {
        "_Loop": "its setter of `restarting`; that of the fit loop overrides the value where there is max_steps",
    },
    "lightning.pytorch.loops.fetchers": {
        "_DataFetcher": "reads the training data; the class for annotations",
        "_DataLoaderIterDataFetcher": "tells a training_step that reads by itself, so that nobody knows its place",
        "_PrefetchDataFetcher": "tells whether a batch is read ahead of the training, to read it again",
    },
    "lightning.pytorch.loops.fit_loop._FitLoop": {
        "_combined_loader": "the loaders, for their states and random generators; None before the first epoch",
        "_combined_loader_states_to_load": "their states on rank 0, in a checkpoint of another number of ranks",
        "_data_fetcher": "how many batches are read, and whether one is read ahead",
        "_data_source": "makes the training loader, whose batch size is asked for before there is one",
        "_last_train_dl_reload_epoch": "restored, for reload_dataloaders_every_n_epochs",
        "_load_combined_loader_states": "wrapped: the only step right before the first iterators are made",
        "_resuming_from_checkpoint": "False makes iterators anew, after the random numbers are restored",
        "_should_accumulate": "whether the optimizer waits for further batches",
        "_skip_backward": "set under a pipeline, whose training_step runs the backward passes",
    },
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop": {
        "_batches_that_stepped": "the step that Lightning gives the values of self.log",
        "_get_monitor_value": "wrapped: what ReduceLROnPlateau follows becomes the same on all ranks",
        "_broadcast_sigterm_tensor": "replaced: each step of a GPU would wait for it, and the ranks agree by the store",
        "_on_before_fetch": "wrapped: the moment before a batch is read",
        "_results": "what self.log has accumulated in the epoch, which Lightning's checkpoint lacks",
    },
    "lightning.pytorch.utilities.combined_loader": {
        "_shutdown_workers_and_reset_iterator": "ends workers that began with other random numbers",
    },
    "lightning.pytorch.utilities.combined_loader._MaxSizeCycle": {
        "_consumed": "which loaders have ended once: when all have, the epoch ends",
    },
    "lightning.pytorch.utilities.combined_loader.CombinedLoader": {
        "_iterator": "the loaders' iterators: a shorter loader's begins anew within the epoch",
        "_load_state_dicts": "gives loaders with a state_dict their places back",
        "_mode": "whether a shorter loader begins anew at all",
        "_state_dicts": "the places of loaders with a state_dict",
    },
    "lightning.pytorch.trainer.connectors.data_connector": {
        "_DataLoaderSource": "what makes the training loader; the class for annotations",
    },
    # What a Trainer's parts do; it has no public member for any of them.
    "lightning.pytorch.trainer.trainer.Trainer": {
        "_checkpoint_connector": "makes a checkpoint in memory, which is copied before it is written; and loads one",
        "_logger_connector": "holds the values of self.log, and says whether a step is logged",
        "_run": "its frame has the path that fit was given, which no callback is told; above it is who called fit",
        "_signal_connector": "installs Lightning's handler of SIGTERM, which ours replaces",
    },
    "lightning.pytorch.callbacks.lr_finder.LearningRateFinder": {
        "_early_exit": "a fit of the Tuner, which searches and does not train",
    },
    "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector": {
        "resume_start": "wrapped: reads the checkpoint to restore, before or after the strategy's set-up",
    },
    "lightning.pytorch.trainer.call": {
        "_call_and_handle_interrupt": "the entry of a fit: tells in a stack what Lightning called from what called it",
    },
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector": {
        "_original_handlers": "the script's handlers, to put them back where ours gives up within a fit",
        "_sigterm_notifier_fn": "replaced: Lightning's broadcasts inside of the handler, which breaks the group",
    },
    # Values of self.log, which Lightning's checkpoint lacks.
    "lightning.pytorch.trainer.connectors.logger_connector.logger_connector._LoggerConnector": {
        "_callback_metrics": "what trainer.callback_metrics returns, for early stopping and the best checkpoints",
        "_current_fx": "the hook that logged last, by which self.log tells whether to begin anew",
        "_first_loop_iter": "whether the first batch of the epoch is being logged, likewise",
        "_logged_metrics": "what trainer.logged_metrics returns",
        "_progress_bar_metrics": "what trainer.progress_bar_metrics returns",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result": {
        "_Metadata": "made anew with the arguments of self.log that were saved",
        "_ResultCollection": "the values by name; the class for annotations",
        "_ResultMetric": "a value over the epoch, made anew with what was saved",
        "_Sync": "made anew likewise: whether and how a value is joined over the ranks",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result._Metadata": {
        "_sync": "saved apart, as it holds functions",
    },
    "lightning.pytorch.trainer.connectors.logger_connector.result._Sync": {
        "_should": "whether self.log was given sync_dist",
    },
    # Checkpoints.
    "lightning.pytorch.strategies.strategy.Strategy": {
        "_checkpoint_io": "whether the user gave one: the public property makes one, and some strategies refuse it",
        "_configure_launcher": "overridden: every strategy starts a node's processes as the job has them",
        "_launcher": "set there",
        "_lightning_module": "None where a pipeline was not cut, as teardown would copy meta tensors",
        "_precision_plugin": "set by our setter, which adapts it to device meshes",
    },
    "lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint": {
        "_every_n_epochs": "ours, of the same name and meaning, as Lightning's constructor is not told",
        "_last_checkpoint_saved": "set, for loggers that upload what was saved last",
        "_last_global_step_saved": "set: one checkpoint a step",
        "_monitor_candidates": "the values that a checkpoint's name may have",
        "_should_skip_saving_checkpoint": "whether Lightning would save nothing at this moment",
    },
    # State of callbacks that they leave out of a checkpoint.
    "lightning.pytorch.callbacks.stochastic_weight_avg.StochasticWeightAveraging": {
        "_accumulate_grad_batches": "read at the end of a training, but set only within it",
        "_average_model": "the copy of the module that averages it",
        "_latest_update_epoch": "the epoch of the last average",
        "_scheduler_state": "restored only at the start of the next epoch",
    },
    "lightning.pytorch.callbacks.weight_averaging.WeightAveraging": {
        "_average_model": "the copy of the module that averages it",
        "_swap_models": "extended: an average that validation uses in 16 bits stays what it is",
    },
    "lightning.pytorch.callbacks.pruning.ModelPruning": {
        "_original_layers": "the first weights of a lottery ticket",
        "_parameters_to_prune": "the layers that they belong to",
        "_resample_parameters": "whether they are drawn anew instead",
    },
    # Processes and process groups of strategies.
    "lightning.fabric.utilities.distributed": {
        "_destroy_dist_connection": "taken out of the exit handlers: it waits for other ranks without a limit",
        "_get_default_process_group_backend_for_device": "what Lightning will choose, for which NCCL is prepared",
    },
    "lightning.fabric.utilities.imports": {
        "_IS_INTERACTIVE": "whether Lightning takes this process for a notebook, where it refuses to run a script",
    },
    "lightning.pytorch.strategies.launchers.multiprocessing": {
        "_MultiProcessingLauncher": "tells ddp_spawn and its kin, also those of pytorch_lightning, by its name",
    },
    "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher": {
        "_call_children_scripts": "overridden: each process gets its true rank",
        "_check_can_spawn_children": "refuses to start processes within one that was started",
    },
    "lightning.pytorch.strategies.parallel.ParallelStrategy": {
        "_layer_sync": "whether the Trainer was given sync_batchnorm, which a pipeline refuses",
        "_parallel_devices": "set by our setter, one for each process that the job started on a node",
    },
    "lightning.pytorch.strategies.ddp.DDPStrategy": {
        "_configure_launcher": "called for ddp_spawn and its kin",
        "_ddp_comm_hook": "the hook to register, ours or the user's",
        "_ddp_comm_state": "its state",
        "_ddp_comm_wrapper": "what wraps it",
        "_ddp_kwargs": "the arguments of DDP: tuned settings; whether find_unused_parameters is set",
        "_forward_redirection": "calls training_step through DDP, also that of a module's copy",
        "_num_nodes": "set by our setter, as the job has them",
        "_pl_static_graph_delay_done": "set: of several wrappers each has a first backward pass of its own",
        "_process_group_backend": "what the user chose",
        "_register_ddp_hooks": "overridden: Lightning registers a hook on a GPU only",
        "_setup_model": "overridden: on the current stream; called again with tuned settings, or inside the node",
        "_start_method": "whether processes are forked or spawned",
        "_timeout": "of collectives, for the network's set-up and the time after which a hang is one",
    },
    "lightning.pytorch.overrides.distributed": {
        "_register_ddp_comm_hook": "registers a hook as Lightning does, and says so",
    },
    "lightning.pytorch.strategies.model_parallel.ModelParallelStrategy": {
        "_data_parallel_size": "set before the mesh is made: Lightning's `auto` does not know the module",
        "_device_mesh": "made again, if `auto` left ranks to a module that does not cut itself",
        "_process_group_backend": "as for DDP",
        "_save_distributed_checkpoint": "whether each rank writes its part",
        "_tensor_parallel_size": "as the data-parallel size",
        "_timeout": "as for DDP",
    },
    "lightning.pytorch.strategies.deepspeed.DeepSpeedStrategy": {
        "_init_deepspeed_distributed": "extended: the process group is bound to this process's device",
        "_format_batch_size_and_grad_accum_config": "overridden: the Trainer's numbers and the configuration agree",
        "_init_optimizers": "overridden: several optimizers are refused with what to do instead",
        "_init_config_if_needed": "the configuration is complete before a module is built by it",
        "_initialize_deepspeed_inference": "overridden: a pipeline evaluates by its own engine",
        "_restore_zero_state": "hands whole weights out to the ranks, layer by layer",
        "_set_node_environment_variables": "overridden: DeepSpeed reads mpirun's local rank besides",
        "_setup_model": "overridden: a pipeline's rank has the layers of its stage",
        "_setup_model_and_optimizer": "overridden: a pipeline's engine is not made by deepspeed.initialize",
    },
    "lightning.pytorch.core.optimizer": {
        "_init_optimizers_and_lr_schedulers": "what configure_optimizers returns, before DeepSpeed has it",
    },
    # Fabric's strategies, which share no base with the Trainer's.
    "lightning.fabric.strategies.strategy.Strategy": {
        "_precision": "set by our setter, which has the plugin leave precise what must stay so",
        "_configure_launcher": "overridden, as for the Trainer's; Fabric has set all its numbers by then",
        "_launcher": "set there",
    },
    "lightning.fabric.strategies.parallel.ParallelStrategy": {
        "_parallel_devices": "as for the Trainer's",
    },
    "lightning.fabric.strategies.ddp.DDPStrategy": {
        "_ddp_kwargs": "the arguments of DDP, which is made on the current stream",
        "_determine_ddp_device_ids": "likewise",
        "_num_nodes": "what Fabric sets instead of the property that follows the launch",
        "_process_group_backend": "as for the Trainer's",
        "_timeout": "as for the Trainer's",
    },
    "lightning.fabric.strategies.deepspeed.DeepSpeedStrategy": {
        "_init_deepspeed_distributed": "extended, as for the Trainer's",
        "_set_node_environment_variables": "overridden, as for the Trainer's",
    },
    "lightning.fabric.strategies.model_parallel.ModelParallelStrategy": {
        "_data_parallel_size": "as for the Trainer's",
        "_num_nodes": "as for Fabric's DDP",
        "_process_group_backend": "as for the Trainer's",
        "_tensor_parallel_size": "as for the Trainer's",
        "_timeout": "as for the Trainer's",
    },
    "lightning.fabric.strategies.model_parallel": {
        "_distributed_checkpoint_load": "replaced while a checkpoint is read: it unpickles whatever lies there",
    },
    # Single ones.
    "lightning.fabric.fabric.Fabric": {
        "_strategy": "whether its constructor has made it, when callbacks are asked for",
    },
    "lightning.pytorch.core.module.LightningModule": {
        "_compiler_ctx": "whether torch.compile was given the whole module, which a pipeline refuses",
        "_device_mesh": "what `self.device_mesh` gives",
        "_trainer": "the Trainer, or None where the public property raises an error",
    },
    "lightning.pytorch.plugins.precision.precision.Precision": {
        "_after_closure": "overridden: the hooks before an optimizer step, which look at gradients",
        "_clip_gradients": "overridden: calls a hook of the module's, where DeepSpeed does not clip by itself",
    },
    "lightning.fabric.wrappers": {
        "_FabricModule": "what `fabric.setup` returns, to tell it from other modules",
    },
    "lightning.fabric.wrappers._FabricModule": {
        "_strategy": "whose precision may have multiplied the gradients",
    },
    "lightning.fabric.utilities.logger": {
        "_convert_params": "hyperparameters of any kind as a dictionary, as Lightning's loggers have them",
        "_flatten_dict": "the names of nested ones, likewise",
    },
    "lightning.pytorch.loggers.wandb.WandbLogger": {
        "_experiment": "the run, if it is open, to end it",
        "_wandb_init": "the arguments of wandb.init, to name the run before it is opened",
    },
    "lightning.pytorch.loggers.mlflow.MLFlowLogger": {
        "_checkpoint_callback": "set, as are the next four: our constructor does not call Lightning's",
        "_log_model": "whether checkpoints are uploaded",
        "_logged_model_time": "which of them are",
        "_prefix": "of metrics' names",
        "_run_id": "what logger.run_id returns; of Lightning's own, whether it joins a run",
        "_tracking_uri": "the store of Lightning's own, by which one that opens a run in the job's store is told",
        "_scan_and_log_checkpoints": "overridden: a store that is away does not end the training",
    },
}

# Classes and functions as they are.
Stateful = types._Stateful
DataFetcher = fetchers._DataFetcher
DataLoaderIterDataFetcher = fetchers._DataLoaderIterDataFetcher
PrefetchDataFetcher = fetchers._PrefetchDataFetcher
DataLoaderSource = data_connector._DataLoaderSource
SignalConnector = signal_connector._SignalConnector
LoggerConnector = logger_connector._LoggerConnector
ResultCollection = result._ResultCollection
ResultMetric = result._ResultMetric
MultiProcessingLauncher = multiprocessing._MultiProcessingLauncher
SubprocessScriptLauncher = subprocess_script._SubprocessScriptLauncher
stop_workers = combined_loader._shutdown_workers_and_reset_iterator
default_process_group_backend = distributed._get_default_process_group_backend_for_device
register_communication_hook = ddp_overrides._register_ddp_comm_hook
entry_of_fit = call._call_and_handle_interrupt
convert_params = fabric_logger._convert_params
flatten_dict = fabric_logger._flatten_dict

# Methods of the loops that `checkpoint/loop_progress.py` wraps: of the fit loop, and of the epoch's.
LOAD_LOADER_STATES = "_load_combined_loader_states"
BEFORE_FETCH = "_on_before_fetch"
# The dictionaries of a LoggerConnector. Checkpoints have these names.
LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


# The place within an epoch.


def training_loaders(trainer: Trainer) -> CombinedLoader | None:
    """Return the training loaders as one; None before they are made."""
    return trainer.fit_loop._combined_loader


def follow_together(trainer: Trainer, agree: Callable[[Any], Any]) -> None:
    """Let schedulers that follow a metric step by what the ranks agree on.

    `agree` gets this rank's value, None if it has none, and returns the value of all ranks; a collective.
    """
    loop = trainer.fit_loop.epoch_loop
    own = type(loop)._get_monitor_value
    loop._get_monitor_value = lambda key: agree(own(loop, key))  # type: ignore[method-assign]


def data_fetcher(trainer: Trainer) -> DataFetcher | None:
    """Return what reads the training data; None outside of training."""
    return trainer.fit_loop._data_fetcher


def training_source(trainer: Trainer) -> DataLoaderSource:
    """Return what makes the training loader."""
    return trainer.fit_loop._data_source


def accumulates(trainer: Trainer) -> bool:
    """Tell whether the optimizer does not step after this batch."""
    # The usual case first: Lightning asks the loaders for their lengths to tell the last batch.
    return trainer.accumulate_grad_batches != 1 and trainer.fit_loop._should_accumulate()


def reload_epoch(trainer: Trainer) -> float:
    """Return the epoch in which the loaders were made last; minus infinity if they never were."""
    return trainer.fit_loop._last_train_dl_reload_epoch


def set_reload_epoch(trainer: Trainer, epoch: float) -> None:
    """Set the epoch in which the loaders were made last."""
    trainer.fit_loop._last_train_dl_reload_epoch = epoch


def take_loader_states(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the states that Lightning would give the loaders, and keep it from doing so."""
    states = trainer.fit_loop._combined_loader_states_to_load
    trainer.fit_loop._combined_loader_states_to_load = []
    return states


def set_resuming(trainer: Trainer, resuming: bool) -> None:
    """Set whether Lightning takes the iterators that it has for those of the epoch to resume."""
    trainer.fit_loop._resuming_from_checkpoint = resuming


def set_restarting(trainer: Trainer, restarting: bool) -> None:
    """Set whether the loops go on within an epoch, whatever the fit loop's own setter would make of it."""
    loop._Loop.restarting.fset(trainer.fit_loop, restarting)  # type: ignore[attr-defined]


def skip_backward(trainer: Trainer) -> None:
    """Let `training_step` run the backward pass."""
    trainer.fit_loop._skip_backward = True


def loader_iterators(loaders: CombinedLoader) -> list[Iterator[Any]] | None:
    """Return the list of the loaders' iterators itself; None before they are made."""
    return loaders._iterator.iterators if loaders._iterator is not None else None


def begins_shorter_anew(loaders: CombinedLoader) -> bool:
    """Tell whether a loader that is shorter than another begins anew within the epoch."""
    return loaders._mode == "max_size_cycle"


def make_iterators(fetcher: DataFetcher, made: Callable[[], None]) -> None:
    """Make the loaders' iterators as `iter(fetcher)` does, and call a function before a batch is read ahead."""
    if not isinstance(fetcher, PrefetchDataFetcher):
        iter(fetcher)
        made()
        return
    fetchers._DataFetcher.__iter__(fetcher)
    made()
    if fetcher.length is None:
        with suppress(StopIteration):
            for _ in range(fetcher.prefetch_batches):
                fetcher.batches.append(fetchers._DataFetcher.__next__(fetcher))


def ended_once(loaders: CombinedLoader) -> list[bool]:
    """Return Lightning's own list of which loaders have ended in this epoch; empty unless shorter ones begin anew."""
    found: list[bool] = getattr(loaders._iterator, "_consumed", [])
    return found


def loader_states(loaders: CombinedLoader) -> list[dict[str, Any]]:
    """Return the states of the loaders that have any."""
    return loaders._state_dicts()


def load_loader_states(loaders: CombinedLoader, states: list[dict[str, Any]]) -> None:
    """Give the loaders the states that `loader_states` returned."""
    loaders._load_state_dicts(states)


# Values of self.log.


def logger_connector_of(trainer: Trainer) -> LoggerConnector:
    """Return what holds the values that callbacks, loggers and the progress bar see."""
    return trainer._logger_connector


def updates_logs(trainer: Trainer) -> bool:
    """Tell whether this step's values go to the loggers."""
    return trainer._logger_connector.should_update_logs


def logged_step(trainer: Trainer) -> int:
    """Return the step at which Lightning logs values of `self.log` now; the same on every rank."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def epoch_results(trainer: Trainer) -> ResultCollection:
    """Return the values of the training epoch by name."""
    return trainer.fit_loop.epoch_loop._results


class _ResultInPlace(result._ResultMetric):
    """A value of `self.log` that stays as it is once it is on the right device.

    Lightning copies all its attributes at each `self.log`, which takes the host half a millisecond.
    """

    @override
    def to(self, device: torch.device) -> result._ResultMetric:  # type: ignore[override]  # how self.log calls it
        if self.is_tensor and self.value.device == device:
            return self
        return super().to(device)


class _ResultsInPlace(result._ResultCollection):
    @override
    def __setitem__(self, key: str, value: result._ResultMetric) -> None:
        value.__class__ = _ResultInPlace
        super().__setitem__(key, value)


def log_in_place(trainer: Trainer) -> None:
    """Have `self.log` leave the values of a training epoch on the device that they are on."""
    trainer.fit_loop.epoch_loop._results.__class__ = _ResultsInPlace


def last_hook(connector: LoggerConnector) -> tuple[str | None, bool]:
    """Return the hook that called `self.log` last, and whether a batch of the epoch is being logged."""
    return connector._current_fx, connector._first_loop_iter is not None


def set_last_hook(connector: LoggerConnector, hook: str | None, within_epoch: bool) -> None:
    """Let the next `self.log` go on after this hook; within an epoch, not as in its first batch."""
    connector._current_fx = hook
    if within_epoch:
        connector._first_loop_iter = False


def result_arguments(value: ResultMetric) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `new_result` but for functions: those of the value, and those of its reduction."""
    meta = value.meta
    named = {each.name: getattr(meta, each.name) for each in fields(meta) if each.name not in ("reduce_fx", "_sync")}
    return named, {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}


def new_result(
    named: dict[str, Any], sync: dict[str, Any], over_batches: Any, over_ranks: Any, is_tensor: bool
) -> ResultMetric:
    """Make a value as `self.log` would, which refuses one that differs.

    `result_arguments` returned `named` and `sync`. The values of batches are reduced by one function, those of ranks
    by another, `Strategy.reduce`. `is_tensor` is False if a metric was logged.
    """
    meta = result._Metadata(**named, reduce_fx=over_batches)
    meta.sync = result._Sync(fn=over_ranks, **sync)
    return ResultMetric(meta, is_tensor=is_tensor)


# Checkpoints, and what callbacks leave out of them.


def dump_checkpoint(trainer: Trainer) -> dict[str, Any]:
    """Return a checkpoint with everything in it, as `Trainer.save_checkpoint` would write it."""
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def checkpoint_io(strategy: Strategy) -> CheckpointIO | None:
    """Return what writes the strategy's checkpoints; None if nobody has asked for it yet."""
    return strategy._checkpoint_io


def set_checkpoint_io(strategy: Strategy, io: CheckpointIO | None) -> None:
    """Set what writes the strategy's checkpoints; None for what Lightning makes when it is asked."""
    strategy._checkpoint_io = io


def frame_of_run(trainer: Trainer) -> FrameType | None:
    """Return the frame of the call of `fit` or another method in which Lightning calls a hook; None outside of one."""
    frames = (frame for frame, _ in traceback.walk_stack(inspect.currentframe()))
    return next((each for each in frames if each.f_code is Trainer._run.__code__ and _of(each, trainer)), None)


def _of(frame: FrameType, trainer: Trainer) -> bool:
    return frame.f_locals.get("self") is trainer


def given_checkpoint(trainer: Trainer) -> str | None:
    """Return the path that `fit` was given, or that Lightning has chosen itself; None if there is none. For hooks."""
    frame = frame_of_run(trainer)
    path = frame.f_locals.get("ckpt_path") if frame is not None else None
    return str(path) if path else None


def restore_from(trainer: Trainer, checkpoint: str, reading: Callable[[], AbstractContextManager[None]]) -> None:
    """Have this fit restore a checkpoint where it was given none. Call it in a callback's `setup`.

    Some strategies restore before their own set-up and some after it. All do it by one call of the connector, with the
    path that `fit` was given or None, and nothing else reads that path. So only this call's argument changes. The
    checkpoint is read inside the context that `reading` returns.
    """
    connector = trainer._checkpoint_connector
    load = connector.resume_start

    def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        restore_as_given(trainer)
        with reading():
            load(checkpoint_path or checkpoint, weights_only=weights_only)

    connector.resume_start = resume_start  # type: ignore[method-assign]


def restore_as_given(trainer: Trainer) -> None:
    """Undo `restore_from`."""
    trainer._checkpoint_connector.__dict__.pop("resume_start", None)


@contextmanager
def loading_shards_by(load: Callable[[dict[str, Any], Path], None]) -> Iterator[None]:
    """Have the strategies for model parallelism load a state from a folder in another way; a collective."""
    name = "_distributed_checkpoint_load"
    before = getattr(model_parallel, name)
    setattr(model_parallel, name, load)
    try:
        yield
    finally:
        setattr(model_parallel, name, before)


def only_searches(callback: LearningRateFinder | BatchSizeFinder) -> bool:
    """Tell whether the callback ends its fit when it has searched, as in one of the Tuner's."""
    return callback._early_exit


def epoch_of_last_average(callback: StochasticWeightAveraging) -> int | None:
    """Return the epoch of the last average; None if the checkpoint that was loaded has no scheduler of averages."""
    return callback._latest_update_epoch if callback._scheduler_state is not None else None


def set_accumulation(callback: StochasticWeightAveraging, batches: int) -> None:
    """Set the batches of a step that the callback puts back at the end."""
    callback._accumulate_grad_batches = batches


def average_of(callback: WeightAveraging | StochasticWeightAveraging) -> nn.Module | None:
    """Return the average of a module's weights, in a copy of the module; None before it is made."""
    return callback._average_model


def extend_swap(callback: WeightAveraging, swap: Callable[[nn.Module, Callable[[], None]], None]) -> None:
    """Replace how a callback swaps the average and the weights of the module before and after a validation.

    `swap` gets the average, and Lightning's own way to swap.
    """
    callback._swap_models = partial(_swap, callback, swap)  # type: ignore[method-assign]


def _swap(
    callback: WeightAveraging, swap: Callable[[nn.Module, Callable[[], None]], None], module: LightningModule
) -> None:
    assert callback._average_model is not None
    swap(callback._average_model, partial(type(callback)._swap_models, callback, module))


def first_weights(callback: ModelPruning) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each layer of a lottery ticket, the name of its pruned weight, and its copy with the first weights."""
    if callback._resample_parameters:
        return
    for layer in (callback._original_layers or {}).values():
        for index, name in layer["names"]:
            yield callback._parameters_to_prune[index][0], name, layer["data"]


# Loggers.


def mlflow_store(logger: MLFlowLogger) -> tuple[str, str | None]:
    """Return the tracking URI of Lightning's logger, and the run that it joins; None for a new one."""
    return logger._tracking_uri, logger._run_id


def mlflow_arguments(logger: MLFlowLogger) -> dict[str, Any]:
    """Return the arguments of Lightning's logger that hold for whichever run it writes to."""
    return {"tags": logger.tags, "prefix": logger._prefix, "log_model": logger._log_model}


# Signals.


def signal_connector_of(trainer: Trainer) -> SignalConnector:
    """Return what installs Lightning's signal handlers, and knows whether SIGTERM was received."""
    return trainer._signal_connector


def original_handler(trainer: Trainer, signum: signal.Signals) -> Any:
    """Return the handler from before the fit; None if Lightning has not replaced it."""
    return trainer._signal_connector._original_handlers.get(signum)


def replace_sigterm_notifier(trainer: Trainer, handler: Callable[[int, FrameType | None], None]) -> None:
    """Let Lightning compose its handler of SIGTERM from this one, which need not broadcast."""
    trainer._signal_connector._sigterm_notifier_fn = handler  # type: ignore[method-assign, assignment]


def replace_sigterm_broadcast(trainer: Trainer, replacement: Callable[[], None]) -> None:
    """Call this at the beginning of each step, where Lightning broadcasts whether rank 0 got SIGTERM."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = replacement  # type: ignore[method-assign]


def restore_sigterm(trainer: Trainer) -> None:
    """Undo both replacements."""
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
    trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)


# Strategies and modules.


def optimizers_of(module: LightningModule) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Return what `configure_optimizers` makes, as Lightning understands it."""
    return core_optimizer._init_optimizers_and_lr_schedulers(module)


def is_interactive() -> bool:
    """Tell whether this process is a notebook's kernel or an interactive shell."""
    return imports._IS_INTERACTIVE


def collective_timeout(strategy: Strategy) -> timedelta | None:
    """Return the timeout of a strategy's collectives; None for torch's default."""
    return getattr(strategy, "_timeout", None)


def finds_unused_parameters(strategy: DDPStrategy) -> bool:
    """Tell whether DDP was told to look for parameters without gradients."""
    return bool(strategy._ddp_kwargs.get("find_unused_parameters"))


def hook_state(strategy: DDPStrategy) -> object | None:
    """Return what a communication hook of DDP keeps from step to step; None if it keeps nothing."""
    state = strategy._ddp_comm_state
    return None if isinstance(state, dist.ProcessGroup) else state


def broadcasts_buffers(strategy: DDPStrategy) -> bool:
    """Tell whether DDP gives all ranks the first one's buffers."""
    return bool(strategy._ddp_kwargs.get("broadcast_buffers", True))


def sends_by_hook(strategy: Strategy) -> bool:
    """Tell whether DDP was given a communication hook, ours or the user's."""
    return getattr(strategy, "_ddp_comm_hook", None) is not None


def has_bucket_size(strategy: Strategy) -> bool:
    """Tell whether DDP was given a size of its buckets."""
    return bool(getattr(strategy, "_ddp_kwargs", {}).get("bucket_cap_mb"))


def fabric_in_the_making() -> Fabric | None:
    """Return the Fabric whose constructor is running, with its strategy ready; None if there is none.

    Lightning asks for callbacks in the constructor, and tells them nothing. Before the processes start it calls no
    hook. So this looks for the constructor among the callers. If a later Lightning asks elsewhere, it finds none.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not Fabric.__init__.__code__:
        frame = frame.f_back
    fabric = frame.f_locals.get("self") if frame is not None else None
    return fabric if isinstance(fabric, Fabric) and hasattr(fabric, "_strategy") else None


def trainer_of(module: nn.Module) -> Trainer | None:
    """Return the Trainer that a LightningModule is attached to; None for all other modules."""
    return module._trainer if isinstance(module, LightningModule) else None


def precision_of(module: nn.Module) -> Precision | None:
    """Return the precision plugin of a LightningModule's Trainer, or of the Fabric that has wrapped a module."""
    trainer = trainer_of(module)
    if trainer is not None:
        return trainer.precision_plugin
    return module._strategy.precision if isinstance(module, wrappers._FabricModule) else None


def is_compiled(module: LightningModule) -> bool:
    """Tell whether `torch.compile` was given the module as a whole."""
    return module._compiler_ctx is not None


def leave_process_group() -> None:
    """Keep Lightning from destroying a process group when this process ends.

    Lightning registers an exit handler when it makes a group of NCCL. There is one group at a time, so no handler of an
    earlier one is lost.
    """
    atexit.unregister(distributed._destroy_dist_connection)


def give_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Make a mesh what `module.device_mesh` gives."""
    module._device_mesh = mesh
