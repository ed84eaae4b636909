"""Distributed data-parallel training whose processes come from the job, and hooks that compress its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.lightning_internals import is_interactive, register_communication_hook
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.launched import LaunchedStrategy

Compression = Literal["bf16", "fp16", "powersgd"]
Hook = Callable[..., Any]
_HALF_HOOKS: dict[str, Hook] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
# PowerSGD starts with exact all-reduces, so that momentum and the bucket layout settle. DDP rebuilds its buckets after
# the first step, and PowerSGD keeps its error feedback per bucket, so torch accepts no less than 2.
_POWERSGD_EXACT_STEPS = 10


def on_any_backend(hook: Hook) -> Hook:
    """Wrap a hook so that torch accepts it on every backend.

    Torch refuses hooks named bf16_compress_* unless it finds NCCL, and checks only the name. Gloo sums bfloat16 too,
    and so does every NCCL that torch 2.6 and later ships.
    """

    def hook_on_any_backend(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    hook_on_any_backend.__annotations__.clear()  # torch would compare them, and here they are strings
    hook_on_any_backend.__qualname__ = hook.__qualname__  # for Lightning's log
    return hook_on_any_backend


def communication_hook(compression: str, rank: int = 1) -> tuple[object | None, Hook]:
    """Return the state and the hook to register with DistributedDataParallel.

    Args:
        compression: `bf16` or `fp16` halves the bytes; `powersgd` sends low-rank factors and adds the error
            of each step to the gradient of the next (Vogels et al. 2019, https://arxiv.org/abs/1905.13727).
        rank: rank of PowerSGD's factors.

    Raises:
        ConfigurationError: the name is not one of the three, or the rank is below 1.
    """
    if compression in _HALF_HOOKS:
        return None, _HALF_HOOKS[compression]
    if compression != "powersgd":
        raise ConfigurationError(
            f"gradient_compression={compression!r} is unknown. Choose 'bf16', 'fp16' or 'powersgd'."
        )
    if rank < 1:
        raise ConfigurationError(
            f"powersgd_rank={rank} gives matrices without columns. Use 1 or more; 1 to 4 are usual."
        )
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=_POWERSGD_EXACT_STEPS,
        use_error_feedback=True,
        warm_start=True,
    )
    return state, powerSGD_hook


class AzureMLDDPStrategy(LaunchedStrategy, DDPStrategy):
    """Lightning's DDP with nodes, processes and ranks from the Azure ML job: `Trainer(strategy="azureml_ddp")`.

    Besides the launch, it differs from the stock strategy as follows. Gradients are views into the communication
    buckets, which saves a copy in each step. Gradient compression works on every backend; stock Lightning ignores a
    hook on the CPU. In a job with one process per node, it starts the other processes with their true ranks.

    Args:
        gradient_compression: `bf16`, `fp16` or `powersgd`; None sends gradients as they are.
        powersgd_rank: rank of PowerSGD's factors.
        gradient_as_bucket_view: see `torch.nn.parallel.DistributedDataParallel`.
        cluster_environment: replaces the environment that the job's launch gives.
        ddp_comm_state: state of `ddp_comm_hook`.
        ddp_comm_hook: a hook of your own, instead of `gradient_compression`.
        start_method: `popen` runs the script again for each further device; a notebook, which has no script, is forked
            instead. The other methods always fork or spawn; a job refuses them.
        require_infiniband: stop a multi-node job unless NCCL carries it over InfiniBand, instead of warning.
        kwargs: further arguments of `lightning.pytorch.strategies.DDPStrategy` and `DistributedDataParallel`, such
            as `find_unused_parameters`, `static_graph`, `bucket_cap_mb`, `timeout`, `process_group_backend`.

    Raises:
        LaunchError: the job's variables give no rank to trust or contradict the Trainer, or a `start_method` other than
            `popen` in a job.
        ConfigurationError: an unknown compression, or two hooks.
    """

    def __init__(
        self,
        *,
        gradient_compression: Compression | None = None,
        powersgd_rank: int = 1,
        gradient_as_bucket_view: bool = True,
        cluster_environment: ClusterEnvironment | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        require_infiniband: bool = False,
        **kwargs: Any,
    ) -> None:
        if gradient_compression is not None:
            if ddp_comm_hook is not None:
                raise ConfigurationError(
                    "Both gradient_compression and ddp_comm_hook were given. Leave one of them out."
                )
            ddp_comm_state, ddp_comm_hook = communication_hook(gradient_compression, powersgd_rank)
        super().__init__(
            cluster_environment=cluster_environment,
            require_infiniband=require_infiniband,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            start_method=start_method,
            gradient_as_bucket_view=gradient_as_bucket_view,
            **kwargs,
        )
        self._group_is_ours = False
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
    def setup_environment(self) -> None:
        self._group_is_ours = not dist.is_initialized()
        super().setup_environment()

    @override
    def teardown(self) -> None:
        super().teardown()
        # A notebook's own group of one process would be in the way of the next cell, which may fork.
        if self._launcher is None and self._job_environment is None and self._group_is_ours and dist.is_initialized():
            dist.destroy_process_group()

    @override
    def _register_ddp_hooks(self) -> None:
        # Stock Lightning registers hooks only if the device is a GPU, but gloo runs them too.
        assert isinstance(self.model, DistributedDataParallel)
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            hook = wrapper(hook) if wrapper is not None else hook
            register_communication_hook(self.model, self._ddp_comm_state, on_any_backend(hook))
