"""The training, but a restarted rank draws new random numbers."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults import training

from azureml_strategy.checkpoint import job_checkpoint

job_checkpoint.set_random_state = lambda *state: None

if __name__ == "__main__":
    training.main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] == ["tracked"])
