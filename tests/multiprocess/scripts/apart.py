"""A training whose learning rate follows the loss, of each rank or of all."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.multiprocess.scripts.common import report
from tests.multiprocess.scripts.noisy import Noisy, fit
from torch import Tensor


class Follows(Noisy):
    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together = together

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("followed", loss, sync_dist=self.together)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        follow = {"scheduler": plateau, "interval": "step", "monitor": "followed"}
        return {"optimizer": optimizer, "lr_scheduler": follow}


def main() -> None:
    said = []
    for together in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            folder = Path(os.environ["RESULTS"]).parent / str(together)
            fit(folder, module=Follows(together), strategy="azureml_ddp")
        said.append([str(each.message) for each in caught if "not exactly" in str(each.message)])
    report(int(os.environ["RANK"]), together=said[0], apart=said[1])


if __name__ == "__main__":
    main()
