"""Each feature of DDP under azureml_ddp and, in the same processes, under Lightning's own."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from common import Losses, Regression, loader, parameters, quiet_trainer, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from azureml_strategy.strategies import AzureMLDDPStrategy


class BucketViews(Callback):
    """Notes whether DDP's gradients are views into its buckets."""

    seen: bool | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = trainer.strategy.model.gradient_as_bucket_view


# name: (Trainer's arguments, DDP's, the model's)
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "accumulation": ({"accumulate_grad_batches": 2}, {}, {}),
    "unused": ({}, {"find_unused_parameters": True}, {"unused": True}),
    "bf16": ({"precision": "bf16-mixed"}, {}, {}),
    "static_graph": ({}, {"static_graph": True}, {}),
    "clipping": ({"gradient_clip_val": 0.1}, {}, {}),
}
NODES = int(os.environ["WORLD_SIZE"])  # stock Lightning takes the variable away at its end
COMPRESSIONS = ("bf16", "fp16", "powersgd")


def fit(strategy: DDPStrategy, trainer_arguments: dict[str, Any], model_arguments: dict[str, Any]) -> dict[str, Any]:
    model, views = Regression(**model_arguments), BucketViews()
    trainer = quiet_trainer(strategy=strategy, max_epochs=6, callbacks=[views], num_nodes=NODES, **trainer_arguments)
    trainer.fit(model, loader())
    return {"losses": model.losses, "parameters": parameters(model), "views": views.seen, "read": model.read}


def features() -> dict[str, Any]:
    results = {}
    for name, (trainer_arguments, ddp_arguments, model_arguments) in FEATURES.items():
        results[name] = [
            fit(kind(**ddp_arguments), trainer_arguments, model_arguments) for kind in (AzureMLDDPStrategy, DDPStrategy)
        ]
    return results


def compressions() -> dict[str, Any]:
    results = {"none": fit(AzureMLDDPStrategy(), {}, {})}
    for name in COMPRESSIONS:
        strategy = AzureMLDDPStrategy(gradient_compression=name)
        results[name] = fit(strategy, {}, {})
        state = strategy._ddp_comm_state
        errors = getattr(state, "error_dict", {})
        results[name]["error_feedback"] = float(sum(error.norm() for error in errors.values()))
    return results


def begun_anew() -> dict[str, Any]:
    """PowerSGD after a break: in a resume, and with a state of the user's that went through a pickle."""
    checkpoint = Path(os.environ["RESULTS"]).parent / "three.ckpt"
    given = PowerSGDState(None, start_powerSGD_iter=2)
    first = quiet_trainer(strategy=AzureMLDDPStrategy(ddp_comm_state=given, ddp_comm_hook=powerSGD_hook), max_steps=3)
    first.fit(Regression(), loader())
    first.save_checkpoint(checkpoint)
    for name in COMPRESSIONS:
        resumed = quiet_trainer(strategy=AzureMLDDPStrategy(gradient_compression=name), max_epochs=2, max_steps=4)
        resumed.fit(Regression(), loader(), ckpt_path=checkpoint, weights_only=False)
    kept = pickle.loads(pickle.dumps(given))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = AzureMLDDPStrategy(ddp_comm_state=kept, ddp_comm_hook=powerSGD_hook)
    quiet_trainer(strategy=again, max_steps=1).fit(Regression(), loader())
    return {"steps": [given.iter, kept.iter], "told": [str(each.message) for each in caught]}


def evaluations() -> dict[str, Any]:
    model = Regression()
    trainer = quiet_trainer(strategy="azureml_ddp")
    validated = trainer.validate(model, loader(), verbose=False)
    tested = trainer.test(model, loader(), verbose=False)
    predicted = torch.cat(trainer.predict(model, loader()))
    return {"validate": validated, "test": tested, "predict": predicted.flatten().tolist()}


class Unrecorded(Regression):
    """Notes nothing down in its step, which would be compiled anew each time."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self.network(batch[0]).squeeze(1) - batch[0].sum(dim=1)).pow(2).mean()


def compiled() -> dict[str, Any]:
    model, noted = Unrecorded(), Losses()
    trainer = quiet_trainer(strategy="azureml_ddp", max_epochs=6, callbacks=[noted])
    trainer.fit(torch.compile(model, backend=sys.argv[2]), loader())
    eager = fit(AzureMLDDPStrategy(), {}, {})
    return {"losses": noted.losses, "parameters": parameters(model), "eager_losses": eager["losses"]}


def sync_batchnorm() -> dict[str, Any]:
    """On the GPU, where alone torch allows it; both ranks share one, over gloo."""
    strategy = AzureMLDDPStrategy(process_group_backend="gloo")
    return fit(strategy, {"sync_batchnorm": True, "accelerator": "gpu", "devices": 1}, {"batch_norm": True})


PARTS = {
    "features": features,
    "compressions": compressions,
    "begun_anew": begun_anew,
    "evaluations": evaluations,
    "compiled": compiled,
    "sync_batchnorm": sync_batchnorm,
}
results = PARTS[sys.argv[1]]()
report(torch.distributed.get_rank(), **results)
