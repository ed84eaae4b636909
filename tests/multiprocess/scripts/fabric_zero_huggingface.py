"""Models of transformers built and loaded by fabric.init_module under ZeRO-3."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed
import torch
from common import report
from families import make_config, make_model
from lightning.fabric import Fabric
from torch import nn
from transformers import GPT2LMHeadModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from azureml_strategy.huggingface import load_pretrained
from azureml_strategy.strategies.fabric import FabricDeepSpeedStrategy


def numbers(model: nn.Module) -> list[float]:
    """Sums of the parameters, which ZeRO-3 has cut here."""
    found = []
    for parameter in model.parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found.append(float(parameter.detach().double().abs().sum()))
    return found


def main(folder: Path) -> None:
    fabric = Fabric(accelerator="cpu", strategy=FabricDeepSpeedStrategy(stage=3))
    fabric.launch()
    torch.manual_seed(7)
    with fabric.init_module():
        built = GPT2LMHeadModel(make_config("gpt2"))
    with fabric.init_module():
        loaded = load_pretrained(folder)
    whole = [float(each.detach().double().abs().sum()) for each in make_model("gpt2").parameters()]
    parts = sum(each.ds_tensor.numel() for each in loaded.parameters())
    report(
        int(os.environ["RANK"]),
        built=numbers(built),
        loaded=numbers(loaded),
        whole=whole,
        after=is_deepspeed_zero3_enabled(),
        held=parts / sum(each.ds_numel for each in loaded.parameters()),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
