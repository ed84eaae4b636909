"""Trains `my_model.Net`: on this machine, in an emulated job and in Azure ML, by the same lines."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from my_model import Net, Points

import azureml_strategy
from azureml_strategy.checkpoint import JobCheckpoint, checkpoint_to_resume
from azureml_strategy.tracking import JobMLFlowLogger


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--batch-size", type=int, default=64, help="points of a step in each process")
    parser.add_argument("--output", type=Path, default=Path("outputs/script"), help="folder of the checkpoints")
    options = parser.parse_args()
    seed_everything(42)

    logger = JobMLFlowLogger()  # into the job's own run; into mlflow.db on a laptop
    job, resume = azureml_strategy.read_job(), None
    if job is not None and job.attempt > 0:  # a node was taken away, and Azure ML has started the job again
        resume = checkpoint_to_resume("auto", options.output)
        logger.continue_run()

    trainer = Trainer(
        strategy="azureml_ddp",  # nodes and processes come from the job; without one, it is this machine
        max_epochs=options.epochs,
        log_every_n_steps=10,
        logger=logger,
        callbacks=[JobCheckpoint(options.output / "checkpoints", monitor="val/accuracy", mode="max")],
    )
    trainer.fit(Net(learning_rate=options.learning_rate), Points(options.batch_size), ckpt_path=resume)
    if trainer.is_global_zero:
        print(f"{trainer.world_size} processes, val/accuracy {trainer.callback_metrics['val/accuracy']:.3f}")


if __name__ == "__main__":
    main()
