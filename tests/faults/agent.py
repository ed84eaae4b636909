"""Carries out a rank's orders, at places known by Lightning's hooks and by the names of files."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tests.faults.orders import NAMESPACE_VARIABLE, VARIABLE, Order, from_text

_CLONE_NEWNET = 0x40000000  # sched.h
_WRITES = os.O_WRONLY | os.O_RDWR
_MARK, _MANIFEST, _PART = ".incomplete", ".manifest.json", ".part"


def enter_namespace() -> None:
    """Be on the node whose network this process was given; before anything opens a socket."""
    if NAMESPACE_VARIABLE in os.environ:
        with open(os.environ[NAMESPACE_VARIABLE]) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")


class Agent(Callback):
    """Counts how often this rank comes to each place, and does there what it is told.

    What was done, and from which checkpoint this attempt went on, is written to a file before anything else: it says
    which faults were truly met.

    Args:
        rank: this process's.
        checkpoints: the folder of the training's checkpoints.
        done: the file to write to.
    """

    def __init__(self, rank: int, checkpoints: Path, done: Path) -> None:
        self._rank = rank
        self._orders = [order for order in from_text(os.environ.get(VARIABLE, "[]")) if rank in order.ranks]
        self._done = done
        self._folder = str(checkpoints) + os.sep
        self._counts: Counter[str] = Counter()
        self._fresh_batch = False
        self._validating = False
        self._trains = False
        self._lock = threading.RLock()
        sys.addaudithook(self._audit)
        torch.nn.modules.module.register_module_forward_pre_hook(self._forward)
        self.reach("start")

    def reach(self, place: str) -> None:
        """This rank is at a place."""
        with self._lock:  # files are written on threads as well
            self._counts[place] += 1
            count = self._counts[place]
        for order in self._orders:
            if (order.place, order.occurrence) == (place, count):
                self._note(order=order.text())
                _carry_out(order)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.reach("setup")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trains = True
        self._note(went_on_from=Path(trainer.ckpt_path).name if trainer.ckpt_path else None, step=trainer.global_step)

    def on_train_batch_start(self, *arguments: Any) -> None:
        self._fresh_batch, self._validating = True, False

    def on_validation_batch_start(self, *arguments: Any) -> None:
        self._fresh_batch, self._validating = True, True

    def _forward(self, module: torch.nn.Module, arguments: Any) -> None:
        if self._fresh_batch:
            self._fresh_batch = False
            self.reach("validation" if self._validating else "step")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._opened(str(arguments[0]), int(arguments[2] or 0))
        elif event == "os.rename":
            self._renamed(str(arguments[1]))
        elif event in ("os.remove", "shutil.rmtree") and self._is_content(str(arguments[0])) and self._trains:
            self.reach("deleting")

    def _opened(self, path: str, flags: int) -> None:
        if not path.startswith(self._folder):
            return
        if flags & _WRITES:
            self.reach(_written_at(path))
        elif self._is_content(path) and os.path.isfile(path):
            self.reach("checking" if self._trains else "reading")

    def _renamed(self, target: str) -> None:
        if target.startswith(self._folder) and target.endswith((_MARK, _MANIFEST)):
            self.reach("marked" if target.endswith(_MARK) else "committed")

    def _is_content(self, path: str) -> bool:
        return path.startswith(self._folder) and not path.endswith((_MARK, _MANIFEST, _MARK + _PART, _MANIFEST + _PART))

    def _note(self, **what: Any) -> None:
        line = json.dumps({"rank": self._rank, **what}) + "\n"
        descriptor = os.open(self._done, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def _written_at(path: str) -> str:
    if path.endswith(_MARK + _PART):
        return "marking"
    return "committing" if path.endswith(_MANIFEST + _PART) else "writing"


def _carry_out(order: Order) -> None:
    if order.delay_s:
        timer = threading.Timer(order.delay_s, _act, (order,))
        timer.daemon = True
        timer.start()
    else:
        _act(order)


def _act(order: Order) -> None:
    if order.signal:
        os.kill(os.getpid(), signal.Signals[order.signal])
    else:
        subprocess.run(order.command, check=True, stdout=subprocess.DEVNULL)
