"""`azureml-strategy bench`; with --break, where all-reduce computes a wrong sum."""

from __future__ import annotations

import sys

import torch.distributed as dist
from common import report
from torch import Tensor

from azureml_strategy.bench.collectives import COLLECTIVES, AllReduce, Place
from azureml_strategy.cli import main
from azureml_strategy.cluster import detect_launch


class WrongSum(AllReduce):
    def run(self, sent: Tensor, received: Tensor, place: Place) -> None:
        super().run(sent, received, place)
        sent[-1] += 1


launch = detect_launch()
assert launch is not None
if "--break" in sys.argv:
    sys.argv.remove("--break")
    COLLECTIVES["all-reduce"] = WrongSum()
code = main(["bench", "--sizes", "1000,64KiB", "--iterations", "2", "--warmup", "1", *sys.argv[1:]])
report(launch.rank, code=code, group_left=dist.is_initialized(), mlflow="mlflow" in sys.modules)
