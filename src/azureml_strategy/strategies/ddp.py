"""Distributed data-parallel training whose processes come from the job, with communication settings of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.ddp import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import Module
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.control.gather import gather
from azureml_strategy.lightning_internals import is_interactive, register_communication_hook
from azureml_strategy.strategies.changing_parameters import CompletingDDP, Wrappers, follow_backward_passes
from azureml_strategy.strategies.compilation import Compile
from azureml_strategy.strategies.compression import (
    Compression,
    communication_hook,
    for_other_buckets,
    on_any_backend,
    report_lost_errors,
    warn_of_used,
    was_used,
)
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.launched import LaunchedStrategy
from azureml_strategy.strategies.process_group import end_process_group
from azureml_strategy.strategies.tuning.record import Conditions, Tuning, describe_batch, device_name
from azureml_strategy.strategies.tuning.search import Request, Settings, allowed_compressions
from azureml_strategy.strategies.tuning.trials import POWERSGD_EXACT_STEPS, TrialBench
from azureml_strategy.strategies.tuning.tuner import TuningOrder, say, tune


class AzureMLDDPStrategy(LaunchedStrategy, DDPStrategy):
    """Lightning's DDP with nodes, processes and ranks from the Azure ML job: `Trainer(strategy="azureml_ddp")`.

    Besides the launch, it differs from the stock strategy as follows. Gradients are views into the communication
    buckets, which saves a copy in each step. Gradient compression works on every backend; stock Lightning ignores a
    hook on the CPU. In a job with one process per node, it starts the other processes with their true ranks.
    Parameters that are frozen, unfrozen or added later, and those that a step leaves out, train as on one process.

    Args:
        gradient_compression: `bf16`, `fp16` or `powersgd`; None sends gradients as they are.
        powersgd_rank: rank of PowerSGD's factors.
        gradient_as_bucket_view, static_graph: see `torch.nn.parallel.DistributedDataParallel`.
        bucket_cap_mb: size of the buckets that gradients are sent in, in MiB; None for torch's default, 25 after a
            first one of 1.
        first_bucket_mb: size of the first bucket to be sent, in MiB; None for that of the others.
        tune: measure other communication settings before the first step, on a copy of the module, and train with the
            fastest if they are significantly faster. The result is written to `tuned_ddp.json` in the Trainer's
            `default_root_dir`, and a restart takes it from there.
        tune_lossy: allow gradient compression to be picked: any, or those named, such as `bf16`.
        tune_static_graph: allow `static_graph` to be picked. Do so only if each step uses the same parameters.
        tuned: a file of an earlier tuning, whose settings are used instead of those given here. With `tune`, the file
            to write.
        cluster_environment: replaces the environment that the job's launch gives.
        ddp_comm_state: state of `ddp_comm_hook`.
        ddp_comm_hook: a hook of your own, instead of `gradient_compression`.
        start_method: `popen` runs the script again for each further device; a notebook, which has no script, is forked
            instead. The other methods always fork or spawn; a job refuses them.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        compile: compile each kind of repeated block once (`blocks`), or each network in one piece (`whole`), or
            nothing (`off`); see `azureml_strategy.strategies.compilation`.
        compile_mode: of torch.compile, such as `reduce-overhead`, which replays CUDA graphs; None for its default.
        kwargs: further arguments of `lightning.pytorch.strategies.DDPStrategy` and `DistributedDataParallel`, such
            as `find_unused_parameters`, `timeout`, `process_group_backend`.

    Attributes:
        tuning: what was measured, or read from a file; None without either.

    Raises:
        LaunchError: the job's variables give no rank to trust or contradict the Trainer, or a `start_method` other than
            `popen` in a job.
        ConfigurationError: an unknown compression, or two hooks; at the start of training, a file of another model,
            number or kind of devices, precision or version of torch; at the first batch, one of another batch.
    """

    trains_several_types = True
    keeps_addresses = True
    tuning: Tuning | None = None
    # Whether the first batch is still to come: settings are measured on it, or known ones are compared with it.
    _awaits_batch = False
    _wrappers: Wrappers | None = None
    # Whether this batch has had a backward pass.
    _called_backward = False
    # Whether a backward pass of the strategy is running, not a plain `loss.backward()`.
    _in_backward = False

    def __init__(
        self,
        *,
        gradient_compression: Compression | None = None,
        powersgd_rank: int = 1,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        bucket_cap_mb: float | None = None,
        first_bucket_mb: float | None = None,
        tune: bool = False,
        tune_lossy: bool | str | Sequence[str] = False,
        tune_static_graph: bool = False,
        tuned: str | Path | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        require_infiniband: bool = False,
        compile: Compile | bool | None = "off",  # noqa: A002 - torch's word for it
        compile_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        _refuse_conflicts(gradient_compression, ddp_comm_hook, bool(tune or tuned), kwargs)
        if gradient_compression is not None:
            ddp_comm_state, ddp_comm_hook = communication_hook(gradient_compression, powersgd_rank)
        warn_of_used(ddp_comm_state)
        settings = Settings(
            bucket_cap_mb, first_bucket_mb, static_graph, gradient_as_bucket_view, gradient_compression, powersgd_rank
        )
        super().__init__(
            cluster_environment=cluster_environment,
            require_infiniband=require_infiniband,
            compile=compile,
            compile_mode=compile_mode,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            start_method=start_method,
            **{**kwargs, **settings.arguments()},
        )
        request = Request(settings, allowed_compressions(tune_lossy), tune_static_graph)
        self._order = TuningOrder(tune, request, Path(tuned) if tuned else None)
        if self._job_environment is not None and start_method != "popen":
            raise LaunchError(
                f"start_method={start_method!r} in an Azure ML job, where only 'popen' gives each process its rank. "
                "Leave start_method out, or write strategy='azureml_ddp' for 'azureml_ddp_notebook'."
            )

    @override
    def _configure_launcher(self) -> None:
        if is_interactive() and self._job_environment is None and self._must_start_processes():
            self._start_method = "fork"
        if self._start_method == "popen":
            super()._configure_launcher()
        else:
            DDPStrategy._configure_launcher(self)

    @override
    def setup(self, trainer: Trainer) -> None:
        self._awaits_batch = False
        is_tuned = trainer.state.fn == TrainerFn.FITTING and (self._order.tune or self._order.file is not None)
        if is_tuned and self.world_size == 1:
            say("One process sends no gradients, so that there is nothing to tune.")
        elif is_tuned:
            if self.tuning is None:
                self.tuning = self._order.earlier(trainer, self._conditions())
            self._awaits_batch = True
            if self.tuning is not None:
                self._use(self.tuning.pick)
        super().setup(trainer)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._report_lost_errors()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._awaits_batch:
            self._awaits_batch = False
            self._tune_on_batch(args, kwargs)
        self._called_backward = False
        if self._wrappers is not None:
            self._take_wrapper(self._wrappers.begin_step(self.optimizers))
        self._equalize_buffers()
        with ExitStack() as stack:
            if not self._is_automatic:
                stack.callback(follow_backward_passes(lambda: self._average_after_own_backward))
            output = super().training_step(*args, **kwargs)
        self._equalize_buffers()
        if isinstance(self.model, CompletingDDP) and self._is_automatic:
            self.model.awaits_backward = self.model.require_backward_grad_sync
        return output

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._in_backward = True
        try:
            return super().backward(*args, **kwargs)
        finally:
            self._in_backward = False

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._called_backward = True
        if self._wrappers is not None and not self._is_automatic:
            self._take_wrapper(self._wrappers.choose(self.optimizers, between_steps=False))
        super().pre_backward(closure_loss)
        if isinstance(self.model, CompletingDDP):
            if not self._is_automatic:
                self.model.awaits_backward = self.model.require_backward_grad_sync
            self.model.complete_after(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._wrappers is not None and self._wrappers.current.require_backward_grad_sync:
            self._wrappers.average(self.optimizers, also_reduced=False)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if self._wrappers is not None and not self._is_automatic and not self._called_backward:
            self._wrappers.average([optimizer], also_reduced=True)  # gradients that torch.autograd.grad made

        def average_loss() -> Any:
            loss = closure()
            return self.reduce_as_gradients(loss.detach().clone()) if isinstance(loss, Tensor) else loss

        # LBFGS decides by the loss how often it runs the closure, and all ranks must decide alike.
        by_loss = isinstance(optimizer, LBFGS)
        return super().optimizer_step(optimizer, average_loss if by_loss else closure, *args, **kwargs)

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        assert isinstance(self.model, CompletingDDP)
        self._wrappers = Wrappers(self.model, self._wrap_beside)

    @override
    def teardown(self) -> None:
        wrappers, self._wrappers = self._wrappers, None
        super().teardown()
        if wrappers is not None:
            wrappers.release()
        # In a notebook, a group of this process alone would be in the way of the next cell, which may fork.
        if self._launcher is None and self._job_environment is None:
            end_process_group()

    @override
    def _setup_model(self, model: Module) -> CompletingDDP:
        # Lightning 2.6 wraps on a stream of its own. torch 2.11 and newer warn of it, as gradients arrive on another.
        return CompletingDDP(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    @override
    def _register_ddp_hooks(self) -> None:
        # Stock Lightning registers hooks only if the device is a GPU, but gloo runs them too.
        assert isinstance(self.model, CompletingDDP)
        if was_used(self._ddp_comm_state):  # in an earlier training
            self._ddp_comm_state = for_other_buckets(self._ddp_comm_state)
        self._register_hook(self.model, self._ddp_comm_state)

    def _register_hook(self, ddp: CompletingDDP, state: object | None) -> None:
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            hook = wrapper(hook) if wrapper is not None else hook
            register_communication_hook(ddp, state, on_any_backend(hook))

    def _conditions(self) -> Conditions:
        """Return what settings are tuned for in this run, before its first batch; a collective."""
        assert self.lightning_module is not None
        devices = gather(device_name(self.root_device))
        precision = str(self.precision_plugin.precision)
        return Conditions.of(
            self.lightning_module, self.world_size, self.num_nodes, dist.get_backend(), devices, precision
        )

    def _tune_on_batch(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Measure the settings before the module's first step, unless those of an earlier run fit the batch."""
        module = self.lightning_module
        assert module is not None
        batch = gather(describe_batch((arguments, named)))[0]
        used = self._order.request.default
        if self.tuning is not None:
            if self._order.fits_batch(self.tuning, batch):
                return
            used = self.tuning.pick
            say("The communication settings of an earlier attempt are for another batch, and are measured anew.")
        bench = TrialBench(module, arguments, named, self._wrap_copy, self._run_copy)
        here = replace(self._conditions(), batch=batch)
        self.tuning = tune(self._order, module, bench, here)
        if self.tuning.pick != used:  # replace DDP around the module, which has not run yet
            self._unwrap()
            self._use(self.tuning.pick)
            self.configure_ddp()
            self._report_lost_errors()

    def _report_lost_errors(self) -> None:
        assert self.lightning_module is not None
        report_lost_errors(self._ddp_comm_state, self.lightning_module.trainer.global_step)

    def _wrap_copy(self, module: LightningModule, settings: Settings, group: dist.ProcessGroup) -> CompletingDDP:
        """Make DDP of a copy of the module for a trial, over a process group of the trial."""
        arguments = {**self._other_arguments(), **settings.arguments(), "process_group": group}
        wrapped = self._wrap_with(module, arguments)
        if settings.gradient_compression is not None:
            state, hook = communication_hook(
                settings.gradient_compression, settings.powersgd_rank, POWERSGD_EXACT_STEPS, group
            )
            wrapped.register_comm_hook(state, on_any_backend(hook))
        return wrapped

    def _run_copy(
        self, wrapped: CompletingDDP, module: LightningModule, args: tuple[Any, ...], named: dict[str, Any]
    ) -> STEP_OUTPUT:
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(wrapped, module, "training_step", *args, **named)

    @property
    def _is_automatic(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization

    def _equalize_buffers(self) -> None:
        """Have the next forward pass begin with the first rank's buffers, as under automatic optimization.

        torch does so only after a forward pass that expects a backward pass. Under manual optimization none does.
        """
        if isinstance(self.model, CompletingDDP) and not self._is_automatic:
            self.model.require_forward_param_sync = True

    def _average_after_own_backward(self) -> None:
        """Average all gradients after `loss.backward()` in place of `self.manual_backward(loss)`."""
        if self._in_backward or self._wrappers is None or not self._wrappers.current.require_backward_grad_sync:
            return
        self._called_backward = True
        self._wrappers.average(self.optimizers, also_reduced=True)

    def _take_wrapper(self, changed: bool) -> None:
        """Go on with the wrapper of the parameters that train now."""
        if changed:
            assert self._wrappers is not None
            self.model = self._wrappers.current
            self._pl_static_graph_delay_done = self.model.has_reduced

    def _wrap_beside(self, equalize: bool) -> CompletingDDP:
        """Make another DDP of the module as it is now."""
        ddp = self._wrap_module(equalize)
        self._register_hook(ddp, for_other_buckets(self._ddp_comm_state))
        return ddp

    def _wrap_module(self, equalize: bool, **arguments: Any) -> CompletingDDP:
        """Make DDP of the module, without a hook.

        Args:
            equalize: give all ranks the first one's parameters and buffers.
            arguments: of DistributedDataParallel, in place of those of the strategy.
        """
        assert self.lightning_module is not None
        init_sync = {} if equalize else {"init_sync": False}
        return self._wrap_with(self.lightning_module, {**self._ddp_kwargs, **arguments, **init_sync})

    def _wrap_with(self, module: Module, arguments: dict[str, Any]) -> CompletingDDP:
        """Make DDP of a module with other arguments than those of the strategy."""
        given, self._ddp_kwargs = self._ddp_kwargs, arguments
        try:
            return self._setup_model(module)
        finally:
            self._ddp_kwargs = given

    def _unwrap(self) -> None:
        """Take DDP off the module, and its hooks off the parameters."""
        wrappers, self._wrappers = self._wrappers, None
        if wrappers is not None:
            wrappers.release()
        assert self.lightning_module is not None
        self.model = self.lightning_module

    def _use(self, settings: Settings) -> None:
        """Make DDP with these settings from now on."""
        self._ddp_kwargs = {**self._other_arguments(), **settings.arguments()}
        self._ddp_comm_state = self._ddp_comm_hook = None
        if settings.gradient_compression is not None:
            self._ddp_comm_state, self._ddp_comm_hook = communication_hook(
                settings.gradient_compression, settings.powersgd_rank
            )

    def _other_arguments(self) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel that no `Settings` decide."""
        decided = ("bucket_cap_mb", "bucket_cap_mb_list", "static_graph", "gradient_as_bucket_view")
        return {name: value for name, value in self._ddp_kwargs.items() if name not in decided}


def _refuse_conflicts(
    compression: str | None, hook: Callable[..., Any] | None, chosen_by_tuning: bool, arguments: Mapping[str, Any]
) -> None:
    """Refuse arguments that decide on the same thing."""
    if compression is not None and hook is not None:
        raise ConfigurationError("Both gradient_compression and ddp_comm_hook were given. Leave one of them out.")
    if chosen_by_tuning and "bucket_cap_mb_list" in arguments:
        raise ConfigurationError("tune and tuned choose the sizes of buckets. Leave bucket_cap_mb_list out.")
    if chosen_by_tuning and hook is not None:
        raise ConfigurationError(
            "tune and tuned choose how gradients are sent, and so does ddp_comm_hook. Leave one of them out."
        )
