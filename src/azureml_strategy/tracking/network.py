"""Records the network of a run in its MLflow run."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from azureml_strategy.cluster.environ import NETWORK_RECORD_SWITCH
from azureml_strategy.cluster.isolation import IsolatedCallback
from azureml_strategy.network.record import RunNetwork
from azureml_strategy.tracking.logger import job_loggers

ARTIFACT = "network.json"


class NetworkRecorder(IsolatedCallback):
    """Writes the transport, the adapters and every setting with its reason into the job's MLflow run.

    It sets tags (`network.transport`, `network.hcas`, `network.gpudirect`, ...) and writes the artifact `network.json`.
    In a job every Trainer has this callback. It needs one of our strategies and a `JobMLFlowLogger`, and does nothing
    without them.
    """

    switch = NETWORK_RECORD_SWITCH

    @override
    @rank_zero_only
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        network = run_network(trainer)
        if network is None:
            return
        for logger in job_loggers(trainer):
            logger.log_tags(network.tags)
            logger.log_text(network.to_json(), ARTIFACT)


def run_network(trainer: Trainer) -> RunNetwork | None:
    """Return the network that the Trainer's strategy recorded; None unless it is one of ours and runs in a job."""
    network = getattr(trainer.strategy, "network", None)
    return network if isinstance(network, RunNetwork) else None
