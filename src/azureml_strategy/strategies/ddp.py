"""Distributed data-parallel training whose processes come from the job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.lightning_internals import register_communication_hook
from azureml_strategy.strategies.compression import Compression, communication_hook, on_any_backend
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.launched import LaunchedStrategy


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
        start_method: `popen` runs the script again for each further device. The other methods are for notebooks; a
            job refuses them.
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
        if self._job_environment is not None and start_method != "popen":
            raise LaunchError(
                f"start_method={start_method!r} in an Azure ML job, where only 'popen' gives each process its rank. "
                "Leave start_method out."
            )

    @override
    def _configure_launcher(self) -> None:
        if self._start_method == "popen":
            super()._configure_launcher()
        else:
            DDPStrategy._configure_launcher(self)

    @override
    def _register_ddp_hooks(self) -> None:
        # Stock Lightning registers hooks only if the device is a GPU, but gloo runs them too.
        assert isinstance(self.model, DistributedDataParallel)
        hook, wrapper = self._ddp_comm_hook, self._ddp_comm_wrapper
        if hook is not None:
            hook = wrapper(hook) if wrapper is not None else hook
            register_communication_hook(self.model, self._ddp_comm_state, on_any_backend(hook))
