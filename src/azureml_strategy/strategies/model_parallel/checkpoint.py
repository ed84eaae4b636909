"""Gives all ranks the same parameters and batches, and writes and checks their distributed checkpoints."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from lightning_utilities.core.rank_zero import WarningCache
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import (  # type: ignore[attr-defined]
    DefaultSavePlanner,
    FileSystemWriter,
    filesystem,
    metadata,
    planner,
    storage,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from azureml_strategy.checkpoint.allowed_types import type_name
from azureml_strategy.checkpoint.formats import IndexReader, find_unloadable, load_sharded
from azureml_strategy.checkpoint.serialization import require_loadable
from azureml_strategy.control.gather import Exchange
from azureml_strategy.control.messages import register
from azureml_strategy.lightning_internals import loading_shards_by
from azureml_strategy.strategies.errors import ConfigurationError, UnfitCheckpointError

# torch's distributed checkpoint writes the index last, and Lightning writes the rest after it, beside the shards.
_INDEX, _REST = ".metadata", "meta.pt"
_unloadable = WarningCache()
# How many names an error message lists.
_SHOWN = 3
_LAYOUTS = (
    "azureml_model_parallel reads the folders that it writes, and single files of it or of DDP. Weights of another "
    "layout can be made one file by `azureml-strategy consolidate CHECKPOINT OUTPUT`."
)


def copy_from_rank_zero(module: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0, as DDP does, one tensor at a time on the device.

    Otherwise the shards would come from different initial values. Tensors on the meta device have no values yet and
    stay as they are.
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if not tensor.is_meta:
            values = tensor.detach().to(device)
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)


def copy_batch(batch: Any, group: ProcessGroup) -> Any:
    """Return the batch with the tensors of the first rank of the group.

    The ranks read the same samples, but the random numbers of data-loader workers and hooks differ: Lightning seeds
    each rank's workers by its global rank. Ranks that compute parts of one layer would mix different inputs. The
    tensors may be nested in any way. They are on the device, and have the same shapes on each rank.
    """
    source = dist.get_global_rank(group, 0)

    def copied(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, source, group=group)
        return tensor

    return apply_to_collection(batch, Tensor, copied)


# Types in the ranks' messages about the shards that they have and have written.
register(
    *(metadata.ChunkStorageMetadata, metadata.MetadataIndex, metadata.TensorProperties),
    *(planner.SavePlan, planner.WriteItem, planner.WriteItemType, planner.BytesIOWriteData),
    *(planner.TensorWriteData, storage.WriteResult, filesystem._StorageInfo, filesystem._StoragePrefix),
)


def write_distributed(content: tuple[dict[str, Any], dict[str, Any] | None], path: Path, exchange: Exchange) -> None:
    """Write a folder as `torch.distributed.checkpoint.save` and Lightning do.

    The steps, the planner and the writer are torch's. The ranks' messages go through `exchange`, so that this can run
    in a background thread.

    Args:
        content: the state with this rank's shards, and on rank 0 the rest of the checkpoint.
        path: the folder to write.
        exchange: carries messages between the ranks.
    """
    state, rest = content
    leads = exchange.rank == 0
    saving, writer = DefaultSavePlanner(), FileSystemWriter(path)

    def plan_own() -> SavePlan:
        saving.set_up_planner(state, is_coordinator=leads)
        writer.set_up_storage_writer(leads)
        return writer.prepare_local_plan(saving.create_local_plan())

    local_plans = exchange.on_all_ranks(plan_own)

    index: list[Metadata] = []  # rank 0's only

    def plan_all() -> list[SavePlan]:
        plans, merged = saving.create_global_plan(local_plans)
        index.append(merged)
        return writer.prepare_global_plan(plans)

    plan = saving.finish_plan(exchange.on_rank_zero(plan_all)[exchange.rank])
    results = exchange.on_all_ranks(lambda: writer.write_data(plan, saving).wait())

    def finish() -> None:
        writer.finish(index[0], results)
        require_loadable(rest)
        torch.save(rest, path / _REST)

    exchange.on_rank_zero(finish)


def in_plain_types(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with plain lists and dictionaries instead of omegaconf's, such as a recipe's `betas`.

    A restart reads no classes from shards.
    """
    if "omegaconf" not in sys.modules:
        return state
    from omegaconf import DictConfig, ListConfig, OmegaConf

    plain: dict[str, Any] = apply_to_collection(
        state, (DictConfig, ListConfig), lambda each: OmegaConf.to_container(each, resolve=True)
    )
    return plain


def warn_of_unloadable(state: Mapping[str, Any]) -> None:
    """Warn once, when this rank writes a state into shards, that a restart will refuse to read a value of it."""
    for place, value in find_unloadable(dict(state)):
        kind = type_name(type(value))
        _unloadable.warn(
            f"{' → '.join(place)} in the checkpoint is a {kind}, which a restart does not read from shards: it could "
            "run code. Make it a number, a text, or a list of these, or resume with trainer.fit(..., "
            "weights_only=False)."
        )


def reading(weights_only: bool | None) -> AbstractContextManager[None]:
    """Let Lightning load sharded checkpoints without running code of theirs, in this context; False trusts them."""
    return nullcontext() if weights_only is False else loading_shards_by(load_sharded)


def check_checkpoint(path: Path, weights: Mapping[str, torch.Size], strict: bool, trusted: bool = False) -> None:
    """Check a checkpoint before it is loaded. For a single file, only check that it exists.

    Args:
        path: the folder or file.
        weights: the unsharded shape of each entry of the module's state dict.
        strict: whether the checkpoint must have all entries.
        trusted: whether its index may run code.

    Raises:
        CheckpointFormatError: the index is damaged, or would run code.
        UnfitCheckpointError: there is no checkpoint.
        ConfigurationError: the folder has another layout, is incomplete, or belongs to another model.
    """
    if not path.exists():
        raise UnfitCheckpointError(f"There is no checkpoint at {path}.")
    if not path.is_dir():
        return
    missing = [name for name in (_INDEX, _REST) if not (path / name).is_file()]
    if len(missing) == 1:
        raise ConfigurationError(f"The checkpoint {path} is incomplete: {missing[0]} is missing. Use an earlier one.")
    if missing:
        found = sorted(file.name for file in path.iterdir())[:_SHOWN]
        raise ConfigurationError(
            f"{path} is no distributed checkpoint: it holds {', '.join(found) or 'nothing'}, but no {_INDEX}. "
            f"{_LAYOUTS}"
        )
    _check_weights(path, weights, strict, trusted)


def _check_weights(folder: Path, weights: Mapping[str, torch.Size], strict: bool, trusted: bool) -> None:
    entries = IndexReader(folder, trusted).read_metadata().state_dict_metadata
    saved = {
        name.removeprefix("state_dict."): entry.size
        for name, entry in entries.items()
        if name.startswith("state_dict.") and isinstance(entry, TensorStorageMetadata)
    }
    missing = [name for name in weights if name not in saved]
    if missing and strict:
        raise ConfigurationError(
            f"The checkpoint {folder} has no {', '.join(missing[:_SHOWN])} ({len(missing)} of {len(weights)} weights "
            f"of this model are missing). Resume the model that it was written by. {_LAYOUTS}"
        )
    for name, shape in weights.items():
        if name in saved and saved[name] != shape:
            raise ConfigurationError(
                f"{name} is {tuple(shape)}, but {tuple(saved[name])} in the checkpoint {folder}. Resume with the sizes "
                "of the model that it was written by."
            )
