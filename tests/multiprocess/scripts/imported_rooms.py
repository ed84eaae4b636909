"""A training with all that a job gives it by itself; each rank reports which modules of ours it has imported."""

from __future__ import annotations

import sys
from pathlib import Path

from common import Regression, loader, report
from lightning.pytorch import Trainer


def main(folder: str) -> None:
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        max_epochs=2,
        default_root_dir=Path(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader())
    callbacks = [type(callback).__name__ for callback in trainer.callbacks]
    report(
        trainer.global_rank, callbacks=callbacks, modules=[name for name in sys.modules if name.startswith("azureml_")]
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
