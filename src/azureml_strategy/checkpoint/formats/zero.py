"""ZeRO's folder: each rank's part of the float32 weights lies in its optimizer file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from azureml_strategy.checkpoint.formats.format import CheckpointFormat, CheckpointFormatError
from azureml_strategy.checkpoint.formats.pickles import read_file, reading_deepspeed


def _found(path: Path) -> bool:
    # A pipeline with ZeRO inside writes optimizer shards as well, but its weights into files of each layer.
    shards, layers = _files(path, "*zero_pp_rank_*_optim_states.pt"), _files(path, "layer_*-model_states.pt")
    return bool(shards) and not layers


def _read(path: Path, trust_pickles: bool) -> dict[str, Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if _files(path, "*mp_rank_01_model_states.pt"):
        raise CheckpointFormatError(
            f"{path} was saved with tensor_parallel_size above 1: each file holds a slice of each matrix, and "
            "DeepSpeed joins only what ZeRO cut. It resumes with the same tensor_parallel_size. For one file of "
            "weights, train with tensor_parallel_size=1 (stage 3 cuts parameters too) or with azureml_model_parallel, "
            "whose checkpoints are consolidated whatever their tensor_parallel_size."
        )
    # Lightning's own entries, the same on all ranks; the pickled tensors of this file stay on disk.
    with reading_deepspeed(_files(path, "*.pt"), trust_pickles):
        saved = read_file(_files(path, "*_model_states.pt")[0], trust_pickles)
        return {**saved, "state_dict": get_fp32_state_dict_from_zero_checkpoint(str(path))}


def _files(path: Path, pattern: str) -> list[Path]:
    """The files of the folder that `latest` names; none where there is no such thing."""
    latest = path / "latest"
    return sorted((path / latest.read_text().strip()).glob(pattern)) if latest.is_file() else []


ZERO = CheckpointFormat("DeepSpeed ZeRO shards", _found, _read)
