"""One rank of a job whose variables do not tell how many nodes there are.

`environ` changes the variables of single ranks, `absent` ranks never make a Trainer; with `group` the script starts the
process group itself, and with `alone` rank 0 tests without the others. All other arguments are the Trainer's.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from common import Regression, loader, parameters, quiet_trainer, report

from azureml_strategy import AzureMLDDPStrategy, AzureMLEnvironment
from azureml_strategy.cluster.environ import LaunchError

arguments: dict[str, Any] = eval(sys.argv[1])
place = int(os.environ["RANK"])  # the true one
os.environ.update(arguments.pop("environ", {}).get(place, {}))
if place in arguments.pop("absent", ()):
    sys.exit()
if arguments.pop("group", False):
    dist.init_process_group("gloo")
    dist.barrier()
model, told = Regression(), {}
try:
    if arguments.pop("alone", False):
        if place == 0:
            quiet_trainer(devices=1).test(model, loader(), verbose=False)
    else:
        if "timeout_s" in arguments:
            arguments["strategy"] = AzureMLDDPStrategy(timeout=timedelta(seconds=arguments.pop("timeout_s")))
        if arguments.pop("plugin", False):
            arguments["plugins"] = [AzureMLEnvironment()]
        trainer = quiet_trainer(**arguments)
        trainer.fit(model, loader())
        told = {"world_size": trainer.world_size, "num_nodes": trainer.num_nodes, "place": trainer.global_rank}
except LaunchError as error:
    told = {"error": str(error)}
report(
    place,
    **told,
    losses=model.losses,
    read=model.read,
    parameters=parameters(model),
    nodes=os.environ.get("AZUREML_NODE_COUNT"),
)
if dist.is_initialized():
    dist.destroy_process_group()
