"""The training, but a restarted one logs again what is in MLflow already."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults import training

from azureml_strategy.tracking import JobMLFlowLogger

JobMLFlowLogger.continue_run = lambda logger: None

if __name__ == "__main__":
    training.main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] == ["tracked"])
