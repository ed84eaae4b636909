"""Save and restore the states of callbacks and of the data module that are not the same on all ranks, and the timer
that all ranks agree on.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from typing_extensions import override

from azureml_strategy.checkpoint.host_copy import TensorPickler, TensorUnpickler
from azureml_strategy.control.gather import gather_sound

# The limit for all states of a rank together. Larger states are averages of weights and similar, which the ranks or the
# strategy keep equal.
_MOST_BYTES = 1 << 20
_CALLBACKS, _DATA = "callbacks", "data module"
Broadcast = Callable[[tuple[int, bool]], tuple[int, bool]]


def states_of_ranks(trainer: Trainer, checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Collect the states that differ between ranks from Lightning's checkpoint of each rank; a collective.

    Returns:
        The states of each rank, in the order of ranks, with tensors on the host; an empty list if nothing differs.
    """
    if trainer.world_size == 1:
        return []
    own = dict(_small_states(trainer, checkpoint))
    digests = gather_sound({key: state.digest() for key, state in own.items()})
    unequal = {key for each in digests for key in each if any(other.get(key) != each[key] for other in digests)}
    return gather_sound({key: state.on_host() for key, state in own.items() if key in unequal}) if unequal else []


def restore_states(trainer: Trainer, checkpoint: dict[str, Any], states: dict[str, Any]) -> None:
    """Replace rank 0's states in a loaded checkpoint by those of this rank, from `states_of_ranks`.

    Call it before Lightning gives the states to the callbacks.
    """
    for key, state in states.items():
        if key == _DATA:
            if _data_key(trainer) in checkpoint:
                trainer.datamodule.load_state_dict(state)  # type: ignore[attr-defined] # Lightning has loaded rank 0's
        else:
            checkpoint.setdefault(_CALLBACKS, {})[key.removeprefix(f"{_CALLBACKS}/")] = state


@dataclass(frozen=True)
class _State:
    """A state in two parts: its structure, pickled, and its tensors."""

    structure: bytes
    tensors: list[Tensor]

    def digest(self) -> str:
        """A hash of the values. Unlike that of a pickle, it does not depend on the device of the tensors."""
        found = hashlib.sha256(self.structure)
        for each in self.tensors:
            found.update(f"{each.dtype} {tuple(each.shape)}".encode())
            found.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def on_host(self) -> Any:
        """The state itself, with its tensors on the host: another rank cannot use this rank's GPU."""
        copies = [each.detach().cpu().clone() for each in self.tensors]
        return TensorUnpickler(io.BytesIO(self.structure), copies).load()


class _SmallPickler(TensorPickler):
    """Raises ValueError if a state is too large, or holds something that cannot be sent to another rank."""

    def __init__(self, file: io.BytesIO, most_bytes: int) -> None:
        super().__init__(file)
        self._left = most_bytes

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, Tensor):
            if type(obj) not in (Tensor, nn.Parameter) or obj.layout != torch.strided or obj.is_quantized:
                raise ValueError("a tensor in parts")
            self._left -= obj.nbytes
            if self._left < 0:
                raise ValueError("a large tensor")
        return super().persistent_id(obj)


def _small_states(trainer: Trainer, checkpoint: dict[str, Any]) -> Iterator[tuple[str, _State]]:
    """Yield the states that can be compared: none that is large, is sharded over ranks, or cannot be pickled."""
    states = {f"{_CALLBACKS}/{key}": state for key, state in checkpoint.get(_CALLBACKS, {}).items()}
    data = _data_key(trainer)
    if data in checkpoint:
        states[_DATA] = checkpoint[data]
    left = _MOST_BYTES
    for key, state in states.items():
        file = io.BytesIO()
        pickler = _SmallPickler(file, left)
        try:
            pickler.dump(state)
        except Exception:  # a user's type may raise anything, and does so again when the checkpoint is written
            continue
        small = _State(file.getvalue(), pickler.tensors)
        size = len(small.structure) + sum(each.nbytes for each in small.tensors)
        if size <= left and not any(each.is_meta for each in small.tensors):
            left -= size
            yield key, small


def _data_key(trainer: Trainer) -> str | None:
    """The key under which Lightning saves the state of the data module; None without one."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return None if data is None else type(data).__qualname__


class SharedTimer:
    """Measures an interval of time on rank 0, and shares the result with all ranks by a few collectives.

    Clocks differ between ranks, so rank 0 must decide. It does not broadcast at each batch. From the duration of the
    batches so far, it computes after how many batches half of the remaining time will be over, and the ranks ask again
    only then.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self.restart()

    def restart(self) -> None:
        """Restart the interval. Call it on all ranks at the same batch."""
        self._since = time.monotonic()
        self._batches = 0
        self._ask_at = 1

    def due(self, broadcast: Broadcast) -> bool:
        """Count a batch, and tell whether the interval is over. `broadcast` returns rank 0's value on every rank."""
        self._batches += 1
        if self._batches < self._ask_at:
            return False
        elapsed = time.monotonic() - self._since
        left = self._interval_s - elapsed
        pause, due = broadcast((max(1, int(left / elapsed * self._batches / 2)), left <= 0))
        self._ask_at = self._batches + pause
        return due
