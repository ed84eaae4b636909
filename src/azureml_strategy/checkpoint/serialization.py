"""Make checkpoints that torch loads with `weights_only=True`, whatever modules and callbacks put into them."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from azureml_strategy.checkpoint.allowed_types import NameRefusedError, Names
from azureml_strategy.checkpoint.builtin_callbacks import callbacks_of
from azureml_strategy.checkpoint.encoding import NotEncodableError, decode, encode, is_plain, require_decodable
from azureml_strategy.checkpoint.module_record import module_entry
from azureml_strategy.lightning_internals import trainer_of

MOVED = "azureml_strategy_moved"
"""The entry of a checkpoint with the moved values: a list of `{"at": its keys, "value": its plain form}`."""
HUGGING_FACE = "azureml_strategy_hugging_face"
"""The entry of a checkpoint about its transformers models: `azureml_strategy.huggingface.record`."""
WRITTEN_APART = ("state_dict", "optimizer_states")
"""Entries that sharded strategies write into files of their own, not beside Lightning's other entries."""
# A restart does not need the hyperparameters: the module that they build exists before a checkpoint is read.
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
# The functions in these are known only after `configure_optimizers`, and a checkpoint may be read before that.
_OF_OPTIMIZERS = ("optimizer_states", "lr_schedulers")
_left_out = WarningCache()
# The places that were checked already, by the module of the run.
_checked: WeakKeyDictionary[object, set[tuple[Any, ...]]] = WeakKeyDictionary()
# Names that only some versions of torch write into the state of a scheduler.
_OF_VERSIONS = ("verbose",)


class UnsavableStateError(TypeError):
    """State that a restart could not restore, so that writing it would be useless."""


class UnrestorableStateError(ValueError):
    """A checkpoint holds a value that this run cannot or may not restore. The message says which and what to type."""


class PlainDataStrategy(Strategy):
    """Mix-in for strategies: adds entries to checkpoints, moves values back after loading, and warns of what is lost.

    It does so with any CheckpointIO.
    """

    # Of the loaded checkpoint: its number of optimizers, None if these have a file of their own; and the names in the
    # state of each scheduler.
    _restored: tuple[int | None, list[frozenset[str]]] | None = None
    # Of each scheduler: its class, and the names in its state before a checkpoint adds its own. These are None if it is
    # not torch's, as it may write a name only at times. All is None if a callback replaces and restores schedulers.
    _fresh_schedulers: Sequence[tuple[str, frozenset[str] | None]] | None = ()
    # Moved values of the loaded checkpoint that name functions which only optimizers and schedulers may hold, and the
    # checkpoint that they belong to. They are restored when the optimizers exist.
    _postponed: Sequence[Any] = ()
    _incomplete: Mapping[str, Any] = {}

    @property
    def written_apart(self) -> tuple[str, ...]:
        """Entries of a checkpoint that this strategy does not write beside the others."""
        return ()

    def own_entries(self) -> dict[str, Any]:
        """What this strategy adds to each checkpoint, in a form that needs no conversion."""
        return module_entry(self.lightning_module)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        if hasattr(self.checkpoint_io, "strategy"):  # one of ours
            self.checkpoint_io.strategy = self
        super().save_checkpoint({**checkpoint, **self.own_entries()}, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if hasattr(self.checkpoint_io, "strategy"):  # one of ours, which leaves the restoring to this class
            self.checkpoint_io.strategy = self
        checkpoint = self.restored(super().load_checkpoint(checkpoint_path, weights_only), weights_only)
        states = checkpoint.get("optimizer_states")
        optimizers = len(states) if isinstance(states, Sequence) else None
        self._restored = optimizers, [_names(state) for state in checkpoint.get("lr_schedulers") or ()]
        return checkpoint

    def restored(self, loaded: dict[str, Any], weights_only: bool | None) -> dict[str, Any]:
        """Restore what `to_plain` moved, with the names that this run holds. `weights_only=False` trusts the file.

        A value that names a function which only an optimizer or a scheduler may hold is postponed until these exist.
        """
        run, trusted = run_objects(self), weights_only is False
        if self.optimizers or self.lightning_module is None:
            return from_plain(loaded, Names(run, trusted=trusted))
        self._postponed = []
        checkpoint = from_plain(loaded, Names(run, trusted=trusted), self._postponed)
        self._incomplete = checkpoint
        return checkpoint

    @override
    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._postponed:
            from_plain({**self._incomplete, MOVED: self._postponed}, Names(run_objects(self)))  # fills the same lists
        self._postponed, self._incomplete = [], {}
        schedulers: list[Any] = [each.scheduler for each in self.lr_scheduler_configs]
        fresh = [
            (type(each).__name__, _names(vars(each)) if type(each).__module__.startswith("torch.") else None)
            for each in schedulers
        ]
        self._fresh_schedulers = None if callbacks_of(trainer, StochasticWeightAveraging) else fresh

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._restored is not None:
            _warn_of_left_out(*self._restored, self.optimizers, self._fresh_schedulers)
            self._restored = None

    @override
    def teardown(self) -> None:
        super().teardown()
        self._restored, self._postponed, self._incomplete = None, (), {}


def run_objects(strategy: Strategy) -> list[object]:
    """The objects of a run whose functions and classes its checkpoints may name."""
    module = strategy.lightning_module
    if module is None:
        return []
    trainer = trainer_of(module)
    beside = [] if trainer is None else [trainer.datamodule, *trainer.callbacks]  # type: ignore[attr-defined]
    schedulers = [each.scheduler for each in strategy.lr_scheduler_configs]
    return [module, *(each for each in (*beside, *strategy.optimizers, *schedulers) if each is not None)]


def to_plain(checkpoint: dict[str, Any], apart: Collection[str] = (), run: Sequence[object] = ()) -> dict[str, Any]:
    """Make a checkpoint that the weights-only unpickler takes. `from_plain` restores an equal of the original.

    Dictionaries and lists stay, and only the refused values in them move, such as one hyperparameter or the state of
    one callback. A list keeps None in place of a moved value. Other entries, and dictionaries whose keys torch refuses,
    move as a whole. So a reader without `from_plain` never finds half of a value.

    The checkpoint is not changed, and no tensor is copied. Entries named in `apart` stay as they are. With `run`, the
    `run_objects` of the run that writes, a warning tells what a restart of it would not restore.

    Raises:
        UnsavableStateError: a value has no plain form. Hyperparameters without one are left out instead, with a
            warning.
    """
    moved = list(checkpoint.get(MOVED, ()))
    kept = {}
    for name, entry in checkpoint.items():
        if name in apart or name == MOVED or is_plain(entry):
            kept[name] = entry
        elif type(entry) is list or (type(entry) in (dict, OrderedDict) and is_plain(list(entry))):
            kept[name] = _without_moved(name, entry, moved)
        else:
            _move([name], entry, moved)
    if run:
        _warn_of_refused(moved, run)
    return {**kept, MOVED: moved} if moved else kept


def _warn_of_refused(moved: Sequence[Any], run: Sequence[object]) -> None:
    """Warn at the first checkpoint, and not only in the restart, of values that will not be restored."""
    checked, names = _checked.setdefault(run[0], set()), None
    for each in moved:
        place = tuple(decode(each["at"]))
        if place[0] in _HYPERPARAMETERS or place in checked:
            continue
        checked.add(place)
        names = names or Names(run)  # of all that the run holds, which takes a while
        try:
            require_decodable(each["value"], names)
        except Exception as error:  # as in `from_plain`
            text = " → ".join(map(str, place))
            rank_zero_warn(f"A restart will not take {text} of the checkpoints, and so none of them: {error}.")


def _without_moved(name: str, entry: Any, moved: list[Any]) -> Any:
    kept = copy.copy(entry)  # keeps attributes that torch sets on a state dict
    for key, value in enumerate(entry) if type(entry) is list else entry.items():
        if is_plain(value):
            continue
        _move([name, key], value, moved)
        if type(entry) is list:
            kept[key] = None
        else:
            del kept[key]
    return kept


def _move(at: list[Any], value: Any, moved: list[Any]) -> None:
    place = [str(key) for key in at]
    try:
        moved.append({"at": encode(at), "value": encode(value, place)})
    except NotEncodableError as error:
        if at[0] not in _HYPERPARAMETERS:
            raise UnsavableStateError(
                f"No checkpoint can be written: {' → '.join(error.place)} is {error.reason}. A restart takes values, "
                "tensors, and functions and classes by name, and runs no code that a file brings along. In the "
                "state_dict() or on_save_checkpoint() that gave it, return numbers, strings, lists, dictionaries, "
                "tensors or a dataclass of these, and make the object anew from them in load_state_dict() or "
                "on_load_checkpoint()."
            ) from error
        _left_out.warn(
            f"The hyperparameter {' → '.join(place[1:]) or at[0]} is not in the checkpoints: it holds {error.reason}. "
            "Training goes on from them all the same; give it to load_from_checkpoint yourself, and leave it out by "
            f"save_hyperparameters(ignore=[{place[-1]!r}])."
        )


def from_plain(
    checkpoint: dict[str, Any], names: Names | None = None, postponed: list[Any] | None = None
) -> dict[str, Any]:
    """Restore a checkpoint to what it was before `to_plain`. Its dictionaries and lists are filled in place.

    Args:
        checkpoint: the loaded checkpoint.
        names: the functions and classes that it may name; by default only those that can do no harm.
        postponed: receives the values that may name functions of optimizers or schedulers that do not exist yet. None
            refuses such values.

    Raises:
        UnrestorableStateError: a value cannot be restored, such as one that names a function which is missing or which
            it may not name. Hyperparameters are left out instead, with a warning.
    """
    restored = {name: entry for name, entry in checkpoint.items() if name != MOVED}
    for each in checkpoint.get(MOVED, ()):
        place: Any = ("an entry",)
        try:
            place = decode(each["at"])
            target = restored if len(place) == 1 else restored[place[0]]
            target[place[-1]] = decode(each["value"], names)
        except Exception as error:  # a damaged or foreign entry may raise anything
            may_wait = isinstance(error, NameRefusedError) and len(place) == 2 and place[0] in _OF_OPTIMIZERS
            if may_wait and postponed is not None:
                postponed.append(each)
                continue
            text = " → ".join(map(str, place))
            if place[0] not in _HYPERPARAMETERS:
                raise UnrestorableStateError(f"{text} of the checkpoint cannot be restored: {error}.") from error
            rank_zero_warn(f"{text} of the checkpoint is left out, as it cannot be restored: {error}.")
    return restored


def require_loadable(content: Any) -> None:
    """Write the content of a file to memory, without its dense tensors, and load it back as a restart does.

    torch's weights-only unpickler takes any dense tensor, so there is no need to try them. The unpickler is written in
    Python and takes 0.1 ms for each. With the tensors of a large model, it would hold the interpreter's lock for so
    long that the training waits.

    Raises:
        ValueError: torch refuses the content.
    """
    _load_back(content, _WithoutTensors)


class _WithoutTensors:
    """The part of `pickle` that `torch.save` needs, except that each tensor becomes an empty dictionary."""

    class Pickler(pickle.Pickler):
        @override
        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, Tensor):
                return NotImplemented
            # A dense tensor is only numbers in memory. torch would also write attributes that were set on it.
            plain = type(obj) in (Tensor, nn.Parameter) and not vars(obj)
            if not plain or obj.layout is not torch.strided or obj.is_quantized:
                _load_back(obj, pickle)
            return OrderedDict, ()


def _load_back(content: Any, pickle_module: Any) -> None:
    file = io.BytesIO()
    torch.save(content, file, pickle_module=pickle_module)
    try:
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and classes of the user's may raise anything
        file.seek(0)
        found = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        reason = f"it holds {', '.join(sorted(found))}" if found else str(error)
        raise ValueError(
            f"a restart could not load it: {reason}. It reads values and tensors only, or what was registered with "
            "torch.serialization.add_safe_globals"
        ) from error


def saved_hyperparameters(checkpoint: str | Path, *, trust_pickles: bool = False) -> dict[str, Any]:
    """Read all hyperparameters of a checkpoint, including those that `load_from_checkpoint` does not find by itself.

    These are values that torch's weights-only unpickler refuses, such as a Path or a DictConfig. Call
    `Module.load_from_checkpoint(path, **saved_hyperparameters(path))`.

    Args:
        checkpoint: a single file, such as one that `azureml-strategy consolidate` wrote.
        trust_pickles: take all functions and classes that the file names. Without it, only those are taken that only
            compute or only hold data, and those that you have registered with `torch.serialization.add_safe_globals`.
            A hyperparameter that names another one is left out, with a warning.

    Returns:
        The arguments of the module, by name.
    """
    return hyperparameters(from_plain(_load(checkpoint), Names(trusted=trust_pickles)))


def hyperparameters(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The saved arguments of the module, by name."""
    found = checkpoint.get("hyper_parameters", {})
    name = checkpoint.get("hparams_name", "kwargs")  # Lightning's name for several arguments
    return dict(found) if name == "kwargs" else {name: found}


def moved_hyperparameters(checkpoint: str | Path) -> list[str]:
    """The names of the hyperparameters in a single file that `load_from_checkpoint` does not find by itself."""
    places = [decode(each["at"]) for each in _load(checkpoint).get(MOVED, ())]
    return [str(at[-1]) for at in places if at[0] in _HYPERPARAMETERS]


def _load(checkpoint: str | Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
    return loaded


def _warn_of_left_out(
    saved_optimizers: int | None,
    saved_schedulers: Sequence[frozenset[str]],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[tuple[str, frozenset[str] | None]] | None,
) -> None:
    """Warn of states that found no optimizer or scheduler, and of those that found no state."""
    found = []
    if saved_optimizers is not None and saved_optimizers != len(optimizers):
        found.append(_unequal("optimizers", saved_optimizers, [type(each).__name__ for each in optimizers]))
    if schedulers is not None and len(saved_schedulers) != len(schedulers):
        found.append(_unequal("schedulers of learning rates", len(saved_schedulers), [kind for kind, _ in schedulers]))
    for saved, (kind, names) in zip(saved_schedulers, schedulers or (), strict=False):  # unequal numbers: see above
        unread = sorted(saved - names) if names is not None else ()
        if unread:
            found.append(
                f"The checkpoint has a scheduler of learning rates with {', '.join(unread)}, which {kind} "
                "does not read: it was another one, whose settings are left out."
            )
    for text in found:
        rank_zero_warn(f"{text} Let configure_optimizers return what it returned, to go on with what they were.")


def _unequal(what: str, saved: int, now: Sequence[str]) -> str:
    lost = f"the states of the last {saved - len(now)} are left out"
    new = f"the last begin anew ({', '.join(now[saved:])})"
    return (
        f"The checkpoint has {saved} {what}, and the training has {len(now)}: {lost if saved > len(now) else new}, as "
        "they are restored in their order."
    )


def _names(state: Any) -> frozenset[str]:
    """The names in a scheduler's state, without those that only some versions of torch write."""
    names = map(str, state) if isinstance(state, Mapping) else ()
    return frozenset(name for name in names if not name.startswith("_") and name not in _OF_VERSIONS)
