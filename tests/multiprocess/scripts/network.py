"""Two fits under azureml_ddp, logged into the job's run; tells what the strategy recorded of its network."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from common import Regression, loader, quiet_trainer, report

from azureml_strategy import AzureMLDDPStrategy
from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.tracking import JobMLFlowLogger

arguments: dict[str, Any] = eval(sys.argv[1])
rank = int(os.environ["RANK"])
if arguments.pop("absent", None) == rank:
    sys.exit()
if "timeout_s" in arguments:
    arguments["timeout"] = timedelta(seconds=arguments.pop("timeout_s"))
logger = JobMLFlowLogger()
error = None
trainers = [quiet_trainer(strategy=AzureMLDDPStrategy(**arguments), logger=logger) for _ in range(2)]
try:
    for trainer in trainers:
        trainer.fit(Regression(), loader())
except LaunchError as raised:
    error = str(raised)
networks = [trainer.strategy.network for trainer in trainers]
report(
    rank,
    error=error,
    lines=[network and network.line for network in networks],
    planned=os.environ.get("AZUREML_STRATEGY_PLANNED"),
    gloo=os.environ.get("GLOO_SOCKET_IFNAME"),
)
