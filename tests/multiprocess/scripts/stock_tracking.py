"""A script that does not mention tracking, in the way that its argument names."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

from common import Regression, loader, report
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger
from torch import Tensor

import azureml_strategy  # noqa: F401 - registers the names
from azureml_strategy.tracking import job_tracking


class Script(Regression):
    """Logs its losses; dies in the first attempt of the job where it is told to."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if case == "dies" and 'attempt_count": 0' in os.environ["AZUREML_CR_COMPUTE_CONTEXT"] and self.global_step == 2:
            for logger in self.trainer.loggers:
                getattr(logger, "flush", int)()
            os._exit(1)
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, sync_dist=True)
        return loss


def fail(*arguments: object, **named: object) -> None:
    raise RuntimeError("a fault of ours")


def main() -> None:
    logger: Any = {"none": False, "csv": CSVLogger("own")}.get(case, True)
    if case == "mlflow":  # the store is Lightning's default in a job, but for a process that was forked
        logger = MLFlowLogger("own", run_name="own", tracking_uri=os.environ["MLFLOW_TRACKING_URI"], prefix="own")
    strategies = {"stock": "ddp", "spawn": "ddp_spawn"}
    trainer = Trainer(
        strategy=strategies.get(case, "azureml_ddp"),
        **({"num_nodes": 2, "devices": 1} if case == "stock" else {"devices": 2} if case == "spawn" else {}),
        accelerator="cpu",
        max_epochs=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=logger,
    )
    # The run is opened on rank 0; of the loggers of the other ranks nothing is written.
    broken = {"fault": (job_tracking.JobTracking, "_open"), "late": (job_tracking.JobMLFlowLogger, "log_metrics")}
    owner, name = broken.get(case, (job_tracking.JobTracking, "_open"))
    rank = int(os.environ["RANK"])
    with patch.object(owner, name, fail if case in broken and rank == 0 else getattr(owner, name)):
        trainer.fit(Script(), loader(batch_size=4))
    report(
        rank,
        steps=trainer.global_step,
        loggers=[type(each).__name__ for each in trainer.loggers],
        run_id=trainer.logger.run_id if case == "mlflow" else None,
    )


if __name__ == "__main__":
    case = sys.argv[1]
    main()
else:
    case = "spawn"  # imported by a process that was spawned
