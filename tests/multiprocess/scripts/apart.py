"""A training whose learning rate follows the loss, of each rank or of all."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
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
    cases = {"together": (True, "azureml_ddp"), "alike": (False, "azureml_ddp"), "apart": (False, DDPStrategy())}
    found: dict[str, Any] = {}
    for name, (together, strategy) in cases.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            folder = Path(os.environ["RESULTS"]).parent / name
            torch.manual_seed(5)
            module = Follows(together)
            fit(folder, module=module, strategy=strategy, num_nodes=2)
        said = [str(each.message) for each in caught if "not exactly" in str(each.message)]
        (scheduler,) = (each.scheduler for each in module.trainer.lr_scheduler_configs)
        found[name] = {
            "said": said,
            "best": float(scheduler.best),
            "rate": module.trainer.optimizers[0].param_groups[0]["lr"],
        }
    report(int(os.environ["RANK"]), **found)


if __name__ == "__main__":
    main()
