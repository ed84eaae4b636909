"""What a process sees of its launch before a Trainer, with it and after it, and how often that was parsed."""

from __future__ import annotations

from typing import Any

from tests.multiprocess.scripts.common import Regression, loader, quiet_trainer, report

from azureml_strategy.cluster import environ, launchers
from azureml_strategy.cluster.launchers import detect_launch

parsed = 0


def counted(variables: Any) -> bool:
    global parsed
    parsed += 1
    return environ.in_azure_ml(variables)


def seen() -> dict[str, Any]:
    launch = detect_launch()
    assert launch is not None
    return {"rank": launch.rank, "of": launch.world_size, "local": launch.local_rank, "parsed": parsed}


launchers.in_azure_ml = counted
trainer = quiet_trainer(strategy="azureml_ddp", devices=2)
constructed = seen()
trainer.fit(Regression(), loader())
report(trainer.global_rank, constructed=constructed, trained=seen())
