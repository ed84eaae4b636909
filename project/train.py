"""Trains `my_model.Net`: on this machine, in an emulated job and in Azure ML, by the same lines."""

from __future__ import annotations

import argparse

from lightning.pytorch import Trainer, seed_everything
from my_model import Net, Points

import azureml_strategy
from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.tracking import JobMLFlowLogger


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--batch-size", type=int, default=64, help="points of a step in each process")
    options = parser.parse_args()
    seed_everything(42)

    job = azureml_strategy.read_job()
    restarted = job is not None and job.attempt > 0  # a node was taken away, and Azure ML has started the job again
    saving = JobCheckpoint(monitor="val/accuracy", mode="max", resume="auto" if restarted else "never")
    trainer = Trainer(
        strategy="azureml_ddp",  # nodes and processes come from the job; without one, it is this machine
        max_epochs=options.epochs,
        log_every_n_steps=10,
        logger=JobMLFlowLogger(),  # into the job's own run; into mlflow.db on a laptop
        callbacks=[saving],
        default_root_dir="outputs/script",  # of checkpoints, unless the job has a folder in storage
    )
    trainer.fit(Net(learning_rate=options.learning_rate), Points(options.batch_size))
    if trainer.is_global_zero:
        print(f"{trainer.world_size} processes, val/accuracy {trainer.callback_metrics['val/accuracy']:.3f}")


if __name__ == "__main__":
    main()
