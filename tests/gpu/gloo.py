"""Which collectives two ranks that share a GPU have by gloo; NCCL refuses two ranks on one GPU.

python tests/gpu/gloo.py OUTPUT     # in each of two processes
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

# What a layout needs of them, besides all_reduce and broadcast.
NEEDS = {
    "zero_1": ("all_gather_into_tensor",),
    "zero_2": ("all_gather_into_tensor",),
    "zero_3": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "zero_3_offload": ("all_gather_into_tensor", "reduce_scatter_tensor"),
    "fsdp2": ("all_gather_into_tensor", "reduce_scatter_tensor", "device_mesh"),
    "fsdp2_recomputing": ("all_gather_into_tensor", "reduce_scatter_tensor", "device_mesh"),
    "pipeline": ("send_recv",),
}


def send_and_receive(device: str) -> None:
    tensor = torch.ones(4, device=device)
    (dist.send if dist.get_rank() == 0 else dist.recv)(tensor, 1 - dist.get_rank())


def collectives(device: str) -> dict[str, Callable[[], object]]:
    whole, half = torch.ones(4, device=device), torch.ones(2, device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, half),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(half, whole),
        "device_mesh": lambda: init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("data", "tensor")),
        # The last one: gloo writes from the GPU's address, which ends the process that sends (seen on an H200).
        "send_recv": lambda: send_and_receive(device),
    }


def main(output: Path, device: str) -> None:
    # Lightning binds a group to its GPU; a mesh then splits the group.
    bound = torch.device("cuda", 0) if device == "cuda" else None
    dist.init_process_group("gloo", timeout=timedelta(seconds=20), device_id=bound)
    output.mkdir(parents=True, exist_ok=True)
    told = output / f"{os.environ['RANK']}.json"
    chosen = collectives(device)
    missing = dict.fromkeys(chosen, "a process did not come back from one that was tried before it")
    for name, call in chosen.items():
        missing[name] = "the process did not come back from it"
        told.write_text(json.dumps(missing))
        try:
            call()
            del missing[name]
        except Exception as error:  # whatever it says, the layout is left out with it
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    told.write_text(json.dumps(missing))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
