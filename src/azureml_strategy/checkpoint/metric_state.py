"""Save and restore the values that metrics and `self.log` have accumulated, and those that loggers have yet to write.

Lightning's checkpoint has the states of a torchmetrics metric only if they are persistent, and then only those of rank
0. It lacks the epoch means of `self.log(..., on_epoch=True)` and the values that callbacks monitor.

This file holds every private name of torchmetrics that this needs; those of Lightning are in `lightning_internals.py`.

- `Metric._defaults` names the states. `_update_count`, `_computed` and `_forward_cache` change with them. `_is_synced`
  says whether the states were joined over the ranks, and `_cache` holds the states from before.
- `MetricCollection._groups_checked`, `_state_is_copy` and `_compute_groups_create_state_ref` control how the metrics of
  a collection share states.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from azureml_strategy.interfaces import KeepsPendingMetrics, PendingMetrics
from azureml_strategy.lightning_internals import (
    LOGGED,
    ResultMetric,
    epoch_results,
    last_hook,
    logger_connector_of,
    new_result,
    result_arguments,
    set_last_hook,
)

# Plain data and CPU tensors only: Lightning loads a single-file checkpoint with torch's `weights_only=True`.
MetricState = dict[str, Any]
# The attributes of each metric before the first batch, by the metric's path.
Settings = dict[str, dict[str, Any]]

_CPU = torch.device("cpu")
_HOLDERS = (Metric, MetricCollection, MetricTracker)
_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_ALWAYS = frozenset({"_update_count", "_computed", "_forward_cache"})
_NOT_OURS = frozenset(vars(nn.Module())) | {"_is_synced", "_cache", "_device"}
_OF_RESULT = ("value", "cumulated_batch_size", "has_reset", *_ALWAYS)
# Every function that Lightning accepts as `reduce_fx`; it refuses a user's own.
_REDUCTIONS: dict[str, Any] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "min", "max")},
    **{function.__name__: function for function in (sum, min, max)},
}


def metric_settings(trainer: Trainer) -> Settings:
    """Record the attributes that the script gave each metric, so that `metric_state` finds what updates have changed.

    Call it in `on_fit_start`, when the metrics exist and have seen no data.
    """
    return {
        path: {
            name: _moved(value, _CPU) if _is_plain(value) else value
            for name, value in _attributes(holder).items()
            if name not in _ALWAYS | _states(holder)
        }
        for path, holder in _find(trainer.lightning_module)
    }


def metric_state(trainer: Trainer, settings: Settings) -> MetricState:
    """Copy the state of this rank's metrics, epoch means and monitored values.

    The function finds metrics that are a submodule of the LightningModule, an attribute of one, or part of an
    attribute's list, tuple or dict of metrics. It copies their states, persistent or not, as this rank has them before
    they are joined over the ranks. It also copies every other attribute that has changed since `settings` and is made
    of tensors, numbers and strings. Call it after all hooks of a step, or of an epoch.
    """
    holders = dict(_find(trainer.lightning_module))
    memo: dict[int, Tensor] = {}  # one copy of each state that metrics of a collection share
    return {
        "metrics": {path: _save_metric(path, each, settings.get(path, {}), memo) for path, each in holders.items()},
        "trackers": {path: len(each) for path, each in holders.items() if isinstance(each, MetricTracker)},
        "logged": _save_logged(trainer, {id(each): path for path, each in holders.items()}),
    }


def restore_metric_state(trainer: Trainer, state: MetricState) -> None:
    """Restore this rank's `metric_state`.

    Call it after `on_train_start`, before the `training_step` of the first batch after the checkpoint.
    """
    for path, holder in list(_find(trainer.lightning_module)):
        # A script's hook adds a metric at each step of a tracker. Add as many as the tracker had.
        while isinstance(holder, MetricTracker) and len(holder) < state["trackers"].get(path, 0):
            holder.increment()
    holders = dict(_find(trainer.lightning_module))
    for path, saved in state["metrics"].items():
        if path in holders and _states(holders[path]) >= set(saved["states"]):
            _fill(holders[path], saved, _device(holders[path]))
        else:
            rank_zero_warn(
                f"The checkpoint has a metric {path!r} with the states {saved['states']}, and the module has none "
                "such: it is left out. Give the module the metrics that it had, to go on with them."
            )
    for holder in holders.values():
        if isinstance(holder, MetricCollection) and holder._groups_checked and not holder._state_is_copy:
            holder._compute_groups_create_state_ref()
    _restore_logged(trainer, state["logged"], holders)


def pending_metrics(trainer: Trainer) -> list[PendingMetrics]:
    """Collect the metrics that each logger has not written yet. A resumed run would not log them again."""
    return [logger.pending_metrics() for logger in trainer.loggers if isinstance(logger, KeepsPendingMetrics)]


def log_pending(trainer: Trainer, kept: list[PendingMetrics]) -> None:
    """Give the loggers their pending metrics back. They skip the metrics that the store already has."""
    loggers = [logger for logger in trainer.loggers if isinstance(logger, KeepsPendingMetrics)]
    for logger, metrics in zip(loggers, kept, strict=False):  # a logger that was added since has no entry
        logger.log_pending(metrics)
    lost = sum(map(len, kept[len(loggers) :]))
    if lost:
        rank_zero_warn(
            f"The checkpoint holds {lost:,} metrics that no store had yet, of a logger that this Trainer has not: they "
            "are left out. Give the Trainer the loggers that it had."
        )


def _find(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each metric, collection and tracker once, with its path."""
    seen: set[nn.Module] = set()

    def below(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
        for path, child in module.named_modules(seen, prefix):
            if isinstance(child, _HOLDERS):
                yield path, child
            for name, value in _attributes(child).items():
                for key, each in _members(value):
                    yield from below(each, f"{path}.{name}{key}".lstrip("."))

    return below(root, "")


def _members(value: Any) -> list[tuple[str, Any]]:
    """The metrics in an attribute that is no submodule. In a list of numbers, `all` stops at the first one."""
    if isinstance(value, _HOLDERS):
        return [("", value)]
    if isinstance(value, dict) and all(isinstance(each, _HOLDERS) for each in value.values()):
        return [(f"[{key!r}]", each) for key, each in value.items()]
    if isinstance(value, (list, tuple)) and all(isinstance(each, _HOLDERS) for each in value):
        return [(f"[{index}]", each) for index, each in enumerate(value)]
    return []


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _NOT_OURS}


def _states(holder: Any) -> set[str]:
    """The names of the states that `add_state` made.

    A ClasswiseWrapper also lists the states of its metric; they belong to that metric and are left out here.
    """
    return {name for name in vars(holder).get("_defaults", ()) if name in vars(holder)}


def _save_metric(path: str, holder: Any, settings: dict[str, Any], memo: dict[int, Tensor]) -> dict[str, Any]:
    values = _attributes(holder) | (holder._cache if getattr(holder, "_is_synced", False) else {})
    changed = {
        name: value
        for name, value in values.items()
        if name not in settings or not _equal(value, settings[name])  # states are never in `settings`
    }
    known = _states(holder) | settings.keys()
    lost = [name for name, value in changed.items() if name in known and not _is_plain(value)]
    if lost:
        rank_zero_warn(
            f"The checkpoint lacks {', '.join(lost)} of the metric {path!r}, and a restart begins it anew: it is not "
            "made of tensors, numbers, strings, lists and dicts. Use such; `add_state` for what is reset."
        )
    return {"states": sorted(_states(holder)), **_save(changed, _device(holder), memo)}


def _device(holder: Any) -> torch.device:
    return holder.device if isinstance(holder, Metric) else _CPU


def _save(values: dict[str, Any], device: torch.device, memo: dict[int, Tensor] | None = None) -> dict[str, Any]:
    """Copy the plain values, and name those that do not live on the device."""
    plain = {name: value for name, value in values.items() if _is_plain(value)}
    return {
        "values": {name: _moved(value, _CPU, {} if memo is None else memo) for name, value in plain.items()},
        "elsewhere": [name for name, value in plain.items() if any(each.device != device for each in _tensors(value))],
    }


def _fill(holder: Any, saved: dict[str, Any], device: torch.device) -> None:
    for name, value in saved["values"].items():
        copy = _moved(value, _CPU if name in saved["elsewhere"] else device)
        current = vars(holder).get(name)
        if isinstance(current, dict) and isinstance(copy, dict):  # it may be of a subclass, or shared
            current.clear()
            current.update(copy)
        else:
            setattr(holder, name, copy)


def _save_logged(trainer: Trainer, paths: dict[int, str]) -> dict[str, Any]:
    connector, device = logger_connector_of(trainer), trainer.lightning_module.device
    results = epoch_results(trainer)
    kept = {
        key: result
        for key, result in results.items()
        if result.meta.sync.group is None and (result.is_tensor or id(result.value) in paths)
    }
    lost = [key for key in results if key not in kept]
    if lost:
        rank_zero_warn(
            f"The checkpoint lacks the values over the epoch of {', '.join(lost)}: after a restart they are over what "
            "is read from then on. Give `self.log` no `sync_dist_group`, and metrics that the module has as attributes."
        )
    hook, within_epoch = last_hook(connector)
    return {
        "results": {key: _save_result(each, paths, device) for key, each in kept.items()},
        "shown": _save({name: dict(getattr(connector, name)) for name in LOGGED}, device),
        # During validation within the epoch, Lightning keeps whether it is the first batch in a local variable.
        "within_epoch": within_epoch or trainer.validating,
        "hook": hook,
    }


def _save_result(result: ResultMetric, paths: dict[int, str], device: torch.device) -> dict[str, Any]:
    named, sync = result_arguments(result)
    return {
        "meta": named,
        "reduce_fx": next(name for name, function in _REDUCTIONS.items() if function is result.meta.reduce_fx),
        "sync": sync,
        "metric": None if result.is_tensor else paths[id(result.value)],
        **_save({name: vars(result)[name] for name in _OF_RESULT if name in vars(result)}, device),
    }


def _restore_logged(trainer: Trainer, logged: dict[str, Any], holders: dict[str, Any]) -> None:
    connector, device = logger_connector_of(trainer), trainer.lightning_module.device
    results = epoch_results(trainer)
    results.clear()
    for key, saved in logged["results"].items():
        is_tensor = saved["metric"] is None
        if not is_tensor and saved["metric"] not in holders:
            continue
        over_batches, over_ranks = _REDUCTIONS[saved["reduce_fx"]], trainer.strategy.reduce
        result = new_result(saved["meta"], saved["sync"], over_batches, over_ranks, is_tensor=is_tensor)
        _fill(result, saved, device)
        if not is_tensor:
            result.value = holders[saved["metric"]]
        results[key] = result
    _fill(connector, logged["shown"], device)
    set_last_hook(connector, logged["hook"], logged["within_epoch"])


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(name) in _SCALARS and _is_plain(each) for name, each in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, Tensor) or type(value) in _SCALARS


def _moved(value: Any, device: torch.device, memo: dict[int, Tensor] | None = None) -> Any:
    """Copy plain data to the device. With a memo, a tensor that occurs twice becomes one copy."""
    if isinstance(value, Tensor):
        found = None if memo is None else memo.get(id(value))
        copy = value.detach().to(device, copy=True) if found is None else found
        if memo is not None:
            memo[id(value)] = copy
        return copy
    if isinstance(value, dict):
        return {name: _moved(each, device, memo) for name, each in value.items()}
    return type(value)(_moved(each, device, memo) for each in value) if isinstance(value, (list, tuple)) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _equal(one: Any, other: Any) -> bool:
    """Whether plain data is equal; other values must be the same object."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.to(_CPU), other)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(_equal, one.values(), other.values()))
    if type(one) in (list, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or (type(one) in _SCALARS and type(one) is type(other) and one == other)
