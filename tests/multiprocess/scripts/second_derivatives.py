"""Gradient penalties: what becomes of them under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.multiprocess.scripts.apart_copies import LAST, Network
from tests.multiprocess.scripts.common import loader, parameters, quiet_trainer, report
from torch import Tensor

from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLDeepSpeedStrategy, AzureMLModelParallelStrategy

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": AzureMLDDPStrategy,
    "tensor parallel": partial(AzureMLModelParallelStrategy, data_parallel_size=1, tensor_parallel_size=LAST + 1),
    "AutoTP": partial(AzureMLDeepSpeedStrategy, stage=1, tensor_parallel_size=LAST + 1),
}


class Penalised(Network):
    def __init__(self, penalised: bool) -> None:
        super().__init__()
        self.penalised = penalised

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"first": "colwise", "second": "rowwise"}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        rows = batch[0].clone().requires_grad_()
        outputs = self(rows)
        loss: Tensor = outputs.square().mean()
        if self.penalised:
            (slopes,) = torch.autograd.grad(outputs.sum(), rows, create_graph=True)
            loss = loss + slopes.square().mean()
        return loss


def weights(strategy: str, penalised: bool) -> list[float] | str:
    module = Penalised(penalised)
    trainer = quiet_trainer(
        strategy=STRATEGIES[strategy](), max_steps=2, devices=LAST + 1, use_distributed_sampler=False
    )
    try:
        trainer.fit(module, loader(4))
    except Exception as error:  # told to the test
        return f"{type(error).__name__}: {error}"
    return [] if strategy != "ddp" else parameters(module)


def main() -> None:
    found = {name: {"with": weights(name, True), "without": weights(name, False)} for name in STRATEGIES}
    report(torch.distributed.get_rank(), **found)


if __name__ == "__main__":
    main()
