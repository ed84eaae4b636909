"""`azureml_local_sgd`: data parallelism whose ranks talk to one another once in a period instead of at every step."""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.checkpoint.formats import AVERAGED
from azureml_strategy.checkpoint.serialization import run_objects, to_plain
from azureml_strategy.control.gather import GroupExchange
from azureml_strategy.interfaces import ALL_RANKS, WriteStaged
from azureml_strategy.lightning_internals import default_process_group_backend
from azureml_strategy.strategies.changing_parameters import Wrappers
from azureml_strategy.strategies.compilation import Compile
from azureml_strategy.strategies.ddp import AzureMLDDPStrategy
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.local_sgd.averaging import PeriodicAveraging
from azureml_strategy.strategies.local_sgd.checkpoint import ENTRY, cloned, rank_part, read_rank_part, writer
from azureml_strategy.strategies.local_sgd.exchange import Exchanges
from azureml_strategy.strategies.local_sgd.period import PeriodSchedule, Rules
from azureml_strategy.strategies.local_sgd.refusals import (
    ONE_ORDER,
    refuse_infiniband,
    refuse_long_period,
    refuse_optimizers,
    refuse_unequal_batches,
    refuse_unordered_nccl,
    refuse_unsupported,
)
from azureml_strategy.strategies.model_parallel.checkpoint import copy_from_rank_zero
from azureml_strategy.strategies.process_group import end_subgroup
from azureml_strategy.strategies.reduction import reduce_over_ranks

# How long the end of a fit waits for an exchange that is under way.
_LAST_WAIT_SECONDS = 60.0


class AzureMLLocalSGDStrategy(AzureMLDDPStrategy):
    """Replicas that train by themselves and average once in a period: `Trainer(strategy="azureml_local_sgd")`.

    For networks on which DDP waits for gradients. A replica takes `period` optimizer steps on its own samples, then the
    replicas take the average of their parameters, or DiLoCo's outer step. Gradients are clipped and accumulated, and
    learning rates scheduled, as each replica alone would. Validation and the end of a fit see the averages. A
    checkpoint is a folder: `averaged.ckpt`, an ordinary file of Lightning's with the averages, and a file for what each
    rank has of its own, from which the same number of ranks goes on bit for bit. Another number goes on from the
    averages.

    Args:
        period: optimizer steps that a replica takes by itself; or a schedule, `GrowingPeriod` or `QuadraticPeriod`.
        warmup_steps: the first optimizer steps of the run are DDP over all ranks, as weights change quickly there.
        replica: what trains by itself: a `node`, inside which gradients are summed, or a `rank`. `auto` is the node
            where the job has several, otherwise the rank.
        outer_learning_rate: of DiLoCo's outer optimizer, 0.7 in its paper; None takes the plain average.
        outer_momentum: of that optimizer, Nesterov SGD.
        compression: `bf16` or `int8` sends changes in fewer bits; what is lost is added to the next change.
        fragments: parts of the parameters, each exchanged at a step of its own, so that no step carries all of it.
        delay: optimizer steps from the start of an exchange to its arrival, behind which it hides. With `delay` equal
            to `period`, the averages of one period arrive at the end of the next: asynchronous, with staleness one.
        mixing: the share of its own parameters that a replica keeps at an arrival; None keeps the steps that it has
            taken since the exchange began.
        allow_infiniband: do not refuse a job of several nodes with InfiniBand.
        compile: compile each kind of repeated block once (`blocks`), or each network in one piece (`whole`), or
            nothing (`off`); see `azureml_strategy.strategies.compilation`.
        compile_mode: of torch.compile, such as `reduce-overhead`, which replays CUDA graphs; None for its default.
        kwargs: further arguments of `AzureMLDDPStrategy`, which hold for the warm-up and, but for hooks, inside a node.

    Raises:
        LaunchError: the job's variables give no rank to trust or contradict the Trainer.
        ConfigurationError: an argument is out of range; or at the start of training, if something does not go together
            with local SGD.
    """

    def __init__(
        self,
        *,
        period: int | PeriodSchedule = 16,
        warmup_steps: int = 0,
        replica: Literal["auto", "node", "rank"] = "auto",
        outer_learning_rate: float | None = None,
        outer_momentum: float = 0.9,
        compression: Literal["bf16", "int8"] | None = None,
        fragments: int = 1,
        delay: int = 0,
        mixing: float | None = None,
        allow_infiniband: bool = False,
        compile: Compile | bool | None = "off",  # noqa: A002 - torch's word for it
        compile_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        tuning = [name for name in ("tune", "tuned") if kwargs.get(name)]
        if tuning:
            raise ConfigurationError(
                f"{tuning[0]} chooses how DDP sends gradients, and replicas of local SGD send none after the warm-up. "
                "Leave it out, or use strategy='azureml_ddp'."
            )
        super().__init__(compile=compile, compile_mode=compile_mode, **kwargs)
        self._rules = Rules(period, outer_learning_rate, outer_momentum, compression, fragments, delay, mixing)
        if replica not in ("auto", "node", "rank"):
            raise ConfigurationError(f"replica={replica!r} is unknown. Choose 'auto', 'node' or 'rank'.")
        if warmup_steps < 0:
            raise ConfigurationError(f"warmup_steps={warmup_steps}. Give 0 or more optimizer steps.")
        self._warmup_steps = warmup_steps
        self._replica = replica
        self._allow_infiniband = allow_infiniband
        self._steps = 0
        self._max_steps = -1
        self._node_group: dist.ProcessGroup | None = None
        self._exchanges: Exchanges | None = None
        self._averaging: PeriodicAveraging | None = None
        self._saved: dict[str, Any] | None = None

    @override
    def setup_environment(self) -> None:
        if self._delays_nccl and not dist.is_initialized():
            os.environ.setdefault(ONE_ORDER, "1")
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            assert self.lightning_module is not None
            if not self._allow_infiniband:
                refuse_infiniband(self.num_nodes)
            if self._delays_nccl:
                refuse_unordered_nccl(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
            refuse_unsupported(trainer, self.lightning_module, sync_batchnorm=self._layer_sync is not None)
            self._connect()
            self._steps = trainer.global_step if self._saved is None else self._saved["global_step"]
            self._max_steps = trainer.max_steps
        super().setup(trainer)
        refuse_optimizers(self.optimizers)

    @override
    def configure_ddp(self) -> None:
        assert isinstance(self.model, LightningModule)
        assert self._exchanges is not None
        self._averaging = PeriodicAveraging(self.model, self._rules, self._exchanges)
        loaded, self._saved = self._saved, None
        local = None
        if loaded is not None and ENTRY in loaded:
            local = loaded.get("own")
            self._averaging.load(loaded[ENTRY], local)
        if self._steps < self._warmup_steps:
            super().configure_ddp()
            return
        if local is None:
            copy_from_rank_zero(self.model, self.root_device)
        self._begin_local_training()

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._trainer
        refuse_unequal_batches(trainer.num_training_batches)
        if self._saved is not None:
            # Lightning's LearningRateFinder has trained in this fit, and then loaded the checkpoint from before.
            self._steps = self._saved["global_step"]
            self._unwrap()
            self.configure_ddp()
        self._refuse_long_period(self._rules.shortest)
        if self._warmup_is_over:
            self._start(_learning_rate(self.optimizers[0]))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._saved is not None:  # LearningRateFinder has searched at the start of an epoch
            self.on_train_start()
        if batch_idx == 0 and self._warmup_is_over:
            self._averaging_of_fit.compare_steps(self._trainer.current_epoch)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        trains_by_itself = self._warmup_is_over
        if trains_by_itself:
            self._averaging_of_fit.before_step()
        output = super().optimizer_step(optimizer, *args, **kwargs)
        self._steps += 1
        if trains_by_itself:
            with self._trainer.profiler.profile(  # type: ignore[attr-defined]
                f"[Strategy]{type(self).__name__}.average"
            ):
                self._averaging_of_fit.after_step(_learning_rate(optimizer))
        elif self._warmup_is_over:
            self._begin_local_training()
            self._start(_learning_rate(optimizer))
        return output

    @override
    def reduce_as_gradients(self, tensor: Tensor) -> Tensor:
        if not self._warmup_is_over:
            return super().reduce_as_gradients(tensor)
        return tensor if self._node_group is None else reduce_over_ranks(tensor, self._node_group)

    @override
    def on_validation_start(self) -> None:
        if self._averages_periodically and not self._trainer.sanity_checking:
            self._averaging_of_fit.show_averages()

    @override
    def on_validation_end(self) -> None:
        if self._averaging is not None:
            self._averaging.show_local()

    @override
    def on_train_end(self) -> None:
        if self._averages_periodically:
            self._averaging_of_fit.end()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the averages of all ranks, while replicas train by themselves; a collective."""
        if not self._averages_periodically:
            return super().lightning_module_state_dict()
        with self._averaging_of_fit.averaged():
            return cloned(super().lightning_module_state_dict())

    @override
    def own_entries(self) -> dict[str, Any]:
        if self._averaging is None:
            return super().own_entries()
        state = {"world_size": self.world_size, "rules": self._plain_rules(), **self._averaging.shared_state()}
        return {**super().own_entries(), ENTRY: state}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        plain = to_plain({**checkpoint, **self.own_entries()}, run=run_objects(self))
        staged = self.stage_checkpoint(plain)
        if staged is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        content, write = staged
        write(content, Path(self.broadcast(filepath)), GroupExchange(self.global_rank))

    def stage_checkpoint(self, checkpoint: dict[str, Any]) -> tuple[Any, WriteStaged] | None:
        """Collect this rank's part of a checkpoint, which is in plain form.

        Returns:
            The content to copy, and a function that writes the copy. None outside of a fit, where there is one file.
        """
        if self._averaging is None or self.lightning_module is None:
            return None
        with self._averaging.with_local_values():
            state = cloned(self.lightning_module.state_dict())
        local = rank_part(checkpoint, type(self.precision_plugin).__qualname__)
        local |= {"state_dict": state, ENTRY: {"step": self._averaging.step, **self._averaging.local_state()}}
        return (checkpoint if self.is_global_zero else None, to_plain(local)), writer(self.checkpoint_io)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        folder = (path / AVERAGED).is_file()
        checkpoint = super().load_checkpoint(path / AVERAGED if folder else path, weights_only)
        if self.lightning_module is None or self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        self._saved = {"global_step": checkpoint.get("global_step", 0)}
        if ENTRY in checkpoint:
            state = self._restore_rank_part(path, checkpoint, weights_only) if folder else {ENTRY: checkpoint[ENTRY]}
            self._saved |= state
        return checkpoint

    @override
    def teardown(self) -> None:
        exchanges, self._exchanges, self._averaging, self._saved = self._exchanges, None, None, None
        if exchanges is not None and exchanges.close(_LAST_WAIT_SECONDS) and dist.is_initialized():
            for group in (exchanges.group, self._node_group):
                if group is not None:
                    end_subgroup(group)
        self._node_group = None
        super().teardown()

    @property
    @override
    def copies(self) -> str | None:
        if not self._averages_periodically or self._averaging_of_fit.are_together:
            return ALL_RANKS
        return f"node {self.node_rank}" if self._node_group is not None else None

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _delays_nccl(self) -> bool:
        """Whether exchanges run on NCCL beside other collectives."""
        backend = self._process_group_backend or default_process_group_backend(self.root_device)
        return self._rules.delay > 0 and self.world_size > 1 and "nccl" in backend

    @property
    def _averaging_of_fit(self) -> PeriodicAveraging:
        assert self._averaging is not None
        return self._averaging

    @property
    def _warmup_is_over(self) -> bool:
        return self._steps >= self._warmup_steps

    @property
    def _averages_periodically(self) -> bool:
        return self._averaging is not None and self._warmup_is_over

    def _connect(self) -> None:
        """Make the process groups for the exchanges and for the gradients inside a node; a collective."""
        several = self.world_size > 1
        group = dist.new_group(timeout=self._timeout, backend=self._process_group_backend) if several else None
        self._exchanges = Exchanges(group, self.root_device)
        processes, nodes = self.num_processes, self.num_nodes
        if self._replica == "node" and nodes == 1:
            raise ConfigurationError(
                "replica='node', but the job has one node, so that there is nothing to average. Use "
                "strategy='azureml_ddp', or replica='rank'."
            )
        if self._replica != "rank" and nodes > 1 and processes > 1:
            ranks = [list(range(node * processes, (node + 1) * processes)) for node in range(nodes)]
            self._node_group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                ranks, timeout=self._timeout, backend=self._process_group_backend
            )

    def _start(self, learning_rate: float) -> None:
        length = self._averaging_of_fit.start(learning_rate)
        if self._averaging_of_fit.step == 0:
            self._refuse_long_period(length)

    def _refuse_long_period(self, period: int) -> None:
        """Refuse a period that is longer than the run, unless the run is only a trial of a few steps."""
        trainer = self._trainer
        searches = trainer.max_steps != self._max_steps  # LearningRateFinder trains for a number of steps of its own
        if not (searches or trainer.fast_dev_run):  # type: ignore[attr-defined]
            refuse_long_period(period, self._warmup_steps, trainer.estimated_stepping_batches)

    def _begin_local_training(self) -> None:
        """Let this replica train by itself from now on: the bare module, or DDP inside the node."""
        self._unwrap()
        if self._node_group is not None:
            wrap = partial(self._wrap_module, process_group=self._node_group)
            self.model = ddp = wrap(equalize=True)
            self._wrappers = Wrappers(ddp, wrap)

    def _plain_rules(self) -> dict[str, Any]:
        """Return the rules in plain values, which a restart compares; a period of the user's class by its name."""
        period = self._rules.period
        known = isinstance(period, int) or is_dataclass(period)
        # The repr of a function contains its address in memory, which differs between ranks.
        named = repr(period) if known else getattr(period, "__qualname__", type(period).__qualname__)
        rules = {each.name: repr(getattr(self._rules, each.name)) for each in fields(self._rules)}
        return {**rules, "period": named, "replica": self._replica}

    def _restore_rank_part(self, path: Path, checkpoint: dict[str, Any], weights_only: bool | None) -> dict[str, Any]:
        """Add the entries of this rank's file to the checkpoint, and return the state of the averaging.

        If the number of ranks or the rules have changed, the averaged weights stay, and a new period begins.
        """
        shared = checkpoint[ENTRY]
        saved_ranks, same_rules = shared["world_size"], shared["rules"] == self._plain_rules()
        source = self.global_rank % saved_ranks

        def read(file: Path) -> dict[str, Any]:
            return self.restored(self.checkpoint_io.load_checkpoint(file, weights_only=weights_only), weights_only)

        local = read_rank_part(path, source, saved_ranks, shared["step"], read)
        averaging = local.pop(ENTRY)
        exact = saved_ranks == self.world_size and same_rules
        if not exact:
            why = "with other rules of local SGD" if not same_rules else f"on {saved_ranks} rank(s)"
            rank_zero_info(f"{path} was written {why}: all replicas start from its averages, with a new period.")
            local.pop("state_dict")
        checkpoint.update(local)
        return {ENTRY: shared, **({"own": averaging} if exact else {})}


def _learning_rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])
