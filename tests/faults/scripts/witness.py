"""What a rank says of its training: fingerprints of all that must be as in the undisturbed run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

# Objects of which only the class is compared; all else is, by its bytes or its text.
_PLAIN = (int, float, str, bool, bytes, type(None))


def fingerprints(value: Any) -> dict[str, str]:
    """By name: of each tensor its first 16 digits of SHA-256, of each number and text itself."""
    return dict(_leaves("", value))


def fingerprint(value: Any) -> str:
    """One for all tensors and numbers in it."""
    return _digest(json.dumps(fingerprints(value)).encode())


class Batches(Callback):
    """Writes down what each step read, right when it begins: a batch that is read again must be the same."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.read = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.read += 1
        line = json.dumps([trainer.current_epoch, batch_idx, fingerprint(batch)]) + "\n"
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())  # in one piece, or not at all
        os.close(descriptor)


def witnessed(trainer: Trainer, kept: Mapping[str, Any]) -> dict[str, Any]:
    """What `oracle.result_differences` compares, when `fit` has returned."""
    module = trainer.lightning_module
    callbacks = [each for each in trainer.callbacks if not isinstance(each, Checkpoint)]
    return {
        "step": trainer.global_step,
        "weights": fingerprints(module.state_dict()),
        "kept": fingerprints(kept),
        "optimizers": fingerprints([_optimizer_state(each) for each in trainer.optimizers]),
        "schedulers": fingerprints([each.scheduler.state_dict() for each in trainer.lr_scheduler_configs]),
        "callbacks": fingerprints({type(each).__name__: each.state_dict() for each in callbacks}),
    }


def _optimizer_state(optimizer: Any) -> dict[str, Any]:
    """Without the last loss of this rank, which LBFGS notes and never reads; a checkpoint has that of rank 0.

    DeepSpeed's optimizer is around one of torch's, which has this rank's part of the states.
    """
    inner = optimizer.optimizer if type(optimizer).__module__.startswith("deepspeed") else optimizer
    whole = inner.state_dict()
    states = whole["state"].items()
    kept = {key: {name: state[name] for name in state if name != "prev_loss"} for key, state in states}
    return {**whole, "state": kept}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), each)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _leaves(f"{name}.{number}" if name else str(number), each)
    else:
        yield name, _leaf(value)


def _leaf(value: Any) -> str:
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous()
        return f"{list(array.shape)} {_digest(array.reshape(-1).view(torch.uint8).numpy().tobytes())}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{list(value.shape)} {_digest(value.tobytes())}"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
