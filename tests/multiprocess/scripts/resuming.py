"""Which checkpoint each rank goes on from, and how many bytes of checkpoints it has read to find out.

Arguments: the output folder, and values of `resume` one after the other.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.multiprocess.scripts.common import report

from azureml_strategy.checkpoint import ResumeError, checkpoint_to_resume
from azureml_strategy.checkpoint import resume as resuming

read: dict[str, int] = {}


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and str(arguments[0]).endswith(".pt"):
        read[str(arguments[0])] = os.path.getsize(arguments[0])


def _choose(resume: str, folder: Path) -> dict[str, Any]:
    read.clear()
    try:
        chosen: Path | str | None = checkpoint_to_resume(resume, folder)
    except ResumeError as error:
        chosen = f"refused: {error}"
    return {"chosen": None if chosen is None else str(chosen), "bytes": sum(read.values()), "read": sorted(read)}


sys.addaudithook(_audit)
report(int(os.environ["RANK"]), choices=[_choose(each, Path(sys.argv[1])) for each in sys.argv[2:]])
stores: list[Any] = resuming._kept_open  # of rank 0, from which the other may be reading still
for store in stores:
    store.wait(["told/1"], timedelta(seconds=60))
