"""Save and restore the states of callbacks and of the data module that are not the same on all ranks.

Lightning's checkpoint has those of rank 0 alone, and gives them to all ranks.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from azureml_strategy.control.gather import gather_sound

# Larger states are averages of weights and the like, which the ranks or the strategy keep equal.
_MOST_BYTES = 1 << 20
_CALLBACKS, _DATA = "callbacks", "data module"


def states_of_ranks(trainer: Trainer, checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Collect the states that differ between ranks; a collective.

    Args:
        trainer: in training.
        checkpoint: Lightning's, of this rank.

    Returns:
        Those of each rank, in the order of ranks; an empty list if nothing differs.
    """
    states = {f"{_CALLBACKS}/{key}": state for key, state in checkpoint.get(_CALLBACKS, {}).items()}
    data = _data_key(trainer)
    if data in checkpoint:
        states[_DATA] = checkpoint[data]
    pickled = {key: _pickled(state) for key, state in states.items()}
    digests = {key: hashlib.sha256(each).hexdigest() for key, each in pickled.items() if each is not None}
    told = gather_sound(digests)
    apart = {key for each in told for key in each if any(other.get(key) != each[key] for other in told)}
    return gather_sound({key: states[key] for key in digests if key in apart}) if apart else []


def restore_states(trainer: Trainer, checkpoint: dict[str, Any], states: dict[str, Any]) -> None:
    """Put the states of this rank in the place of rank 0's, before Lightning gives them to the callbacks.

    Args:
        trainer: in a resumed `fit`.
        checkpoint: as it was read.
        states: what `states_of_ranks` has of this rank.
    """
    for key, state in states.items():
        if key == _DATA:
            trainer.datamodule.load_state_dict(state)  # type: ignore[attr-defined] # after rank 0's
        else:
            checkpoint.setdefault(_CALLBACKS, {})[key.removeprefix(f"{_CALLBACKS}/")] = state


def _data_key(trainer: Trainer) -> str | None:
    """Under which key Lightning saves the state of the data module."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    return None if data is None else type(data).__qualname__


def _pickled(state: Any) -> bytes | None:
    """The bytes of a state; None if it is large, lies on several ranks in parts, or cannot be pickled."""
    tensors = [each for each in tree_leaves(state) if isinstance(each, Tensor)]
    if any(type(each) not in (Tensor, nn.Parameter) for each in tensors):
        return None
    if sum(each.nbytes for each in tensors) > _MOST_BYTES:
        return None
    try:
        pickled = pickle.dumps(state)
    except Exception:  # whatever a user's type raises: what writes the checkpoint says so
        return None
    return pickled if len(pickled) <= _MOST_BYTES else None
