"""Write a checkpoint's weights for other programs: as safetensors, as an ONNX model that computes the forward, or as
the folder for `from_pretrained` at the end of a training.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from azureml_strategy.checkpoint.consolidate import appearing, read_whole, refuse_existing
from azureml_strategy.checkpoint.encoding import decode
from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.checkpoint.module_rebuild import make_module, modules_of
from azureml_strategy.checkpoint.module_record import INPUT, MODULE, read_input
from azureml_strategy.checkpoint.serialization import HUGGING_FACE, MOVED
from azureml_strategy.checkpoint.writer import BackgroundWriter
from azureml_strategy.control.store import ExchangeError, StepError
from azureml_strategy.interfaces import ExportsModels
from azureml_strategy.lazy import require_library

_SAMPLES = 2  # samples of the example that is traced: torch.export would take a single one for a constant
# Entries of a checkpoint that become metadata as they are; and all that need no warning: safetensors keep them, or they
# name the class of the hyperparameters, or they belong to another format.
_AS_TEXT = ("epoch", "global_step", "pytorch-lightning_version")
_KEPT = (*_AS_TEXT, "state_dict", "hyper_parameters", "hparams_name", "hparams_type", MODULE, MOVED, HUGGING_FACE)
INPUT_NAME, OUTPUT_NAME = "input", "output"
"""Names in an ONNX model. Several outputs are numbered by the exporter."""
_NAME = "hugging_face"


def write_safetensors(checkpoint: Path, output: Path, *, trust_pickles: bool = False) -> dict[str, Tensor]:
    """Write the weights as safetensors, under their names in the module.

    The file's metadata keeps what is known of the training, as texts: epoch, step, versions, and as JSON the plain
    hyperparameters and the record of the module. The arguments are those of `consolidate`.

    Returns:
        The weights by name, on the CPU. A tensor that shares its memory with another one is written whole under each
        name.

    Raises:
        CheckpointFormatError: the checkpoint cannot be read, the output exists, or a weight has no form in the format.
        ModuleNotFoundError: safetensors is not installed.
    """
    require_library("safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    refuse_existing(output)
    content = read_whole(checkpoint, trust_pickles=trust_pickles)
    weights = dict(_without_shared_memory(content["state_dict"]))
    try:
        with appearing(output) as part:
            save_file(weights, part, _metadata(content))
    except (SafetensorError, KeyError, ValueError) as error:
        raise CheckpointFormatError(f"The weights cannot be written as safetensors: {error}") from error
    return weights


def _without_shared_memory(weights: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with memory of its own, without gaps."""
    seen: set[int] = set()
    for name, value in weights.items():
        if not isinstance(value, Tensor):
            raise CheckpointFormatError(
                f"{name} of the state dict is {type(value).__name__}, and safetensors holds tensors only. Leave "
                "--format out, or write a register_buffer in place of get_extra_state."
            )
        tensor = value.detach().contiguous()
        storage = tensor.untyped_storage()
        alone = storage.data_ptr() not in seen and storage.nbytes() == tensor.nbytes
        seen.add(storage.data_ptr())
        yield name, tensor if alone else tensor.clone()


def _metadata(content: Mapping[str, Any]) -> dict[str, str]:
    """The metadata about the training, as texts. Warns of what cannot be a text."""
    plain = {name: str(content[name]) for name in _AS_TEXT if name in content}
    hyperparameters = content.get("hyper_parameters", {})
    saved = {name: each for name, each in hyperparameters.items() if _is_json(each)}
    moved = [" → ".join(map(str, decode(each["at"]))) for each in content.get(MOVED, ())]
    others = [str(name) for name in content if name not in _KEPT]
    left_out = [*(f"hyper_parameters → {name}" for name in hyperparameters if name not in saved), *moved, *others]
    if left_out:
        warnings.warn(
            f"The metadata of safetensors are texts, and have no place for {', '.join(left_out)} of the checkpoint: "
            f"{len(left_out)} left out. A file without --format keeps them.",
            stacklevel=3,
        )
    entries = {"hyper_parameters": saved, MODULE: content.get(MODULE)}
    return {"format": "pt", **plain, **{name: json.dumps(each) for name, each in entries.items() if each}}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def write_onnx(
    checkpoint: Path,
    output: Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    code: Path | None = None,
    trust_pickles: bool = False,
) -> tuple[int | None, ...]:
    """Write the module's forward as an ONNX model with a free batch size.

    The arguments are those of `consolidate`; and `code` is a folder with the module of the class, unless it is
    installed.

    Returns:
        The shape of the input; None is the batch size.

    Raises:
        CheckpointFormatError: the checkpoint cannot be read or does not tell class or input, or torch cannot export the
            forward.
        ModuleNotFoundError: onnx or onnxscript is not installed.
    """
    for library in ("onnx", "onnxscript"):
        require_library(library)
    refuse_existing(output)
    content = read_whole(checkpoint, trust_pickles=trust_pickles, overrides=overrides)
    with modules_of(code):  # also while the forward is traced, as it may import
        module = make_module(content)
        example = _example_input(module, content)
        program = _exported(module, example)
    with appearing(output) as part:
        program.save(part, external_data=False)
    return (None, *example.shape[1:])


def _example_input(module: LightningModule, content: Mapping[str, Any]) -> Tensor:
    known = content.get(MODULE, {}).get(INPUT)
    if known is None and isinstance(module.example_input_array, Tensor):
        return module.example_input_array[:1].expand(_SAMPLES, *module.example_input_array.shape[1:]).clone()
    if known is None or None in known["shape"]:
        seen = "neither the checkpoint nor example_input_array tells" if known is None else "varied in the training"
        raise CheckpointFormatError(
            f"The shape of {type(module).__name__}'s input is needed, and {seen} it. Type --input-shape with the sizes "
            "of one sample, such as --input-shape 3,32,32, and --input-dtype if its numbers are not float32."
        )
    sizes, dtype = read_input(known)
    return torch.zeros(_SAMPLES, *(size or 0 for size in sizes), dtype=dtype)


def _exported(module: LightningModule, example: Tensor) -> Any:
    batch = torch.export.Dim("batch")
    try:
        with _without_logs():
            # Given a module, torch.onnx of torch 2.8 falls back on a trace of one input, which would lose what the
            # forward decides by its values. So torch.export is called first.
            program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
            return torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=[INPUT_NAME], output_names=[OUTPUT_NAME]
            )
    except Exception as error:  # tracing runs the user's forward, which may raise anything
        reason = next(iter(str(error.__cause__ or error).strip().splitlines()), type(error).__name__)
        shape, dtype = ", ".join(map(str, example.shape[1:])), str(example.dtype).removeprefix("torch.")
        raise CheckpointFormatError(
            f"torch cannot export the forward of {type(module).__name__} for an input (N, {shape}) of {dtype}: "
            f"{reason}. Type --input-shape if the sizes are wrong; a forward that decides by its input's values has no "
            "ONNX form."
        ) from error


@contextmanager
def _without_logs() -> Iterator[None]:
    """Silence torch, which prints whole graphs, its own deprecations, and libraries that the user does not have."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def require_models(strategy: Strategy) -> None:
    """Check before the training that there is a model to write.

    Raises:
        MisconfigurationException: the strategy is not ours, or the module holds no transformers model.
    """
    if not isinstance(strategy, ExportsModels):
        raise MisconfigurationException(
            f"JobCheckpoint(hugging_face=True), but {type(strategy).__name__} does not record the model. Write "
            "Trainer(strategy='azureml_ddp'), which works with one device too, or another azureml_* strategy."
        )
    if not strategy.has_models():
        raise MisconfigurationException(
            "JobCheckpoint(hugging_face=True), but the module holds no transformers model. Leave hugging_face out, "
            "or keep the model as an attribute of the module."
        )


def write_folder(trainer: Trainer, checkpoint: Path, background: BackgroundWriter) -> None:
    """Write the folder beside a complete checkpoint on rank 0, while the other ranks wait; a collective.

    Call it at the end of the training. A failure becomes a warning.
    """
    strategy, folder = trainer.strategy, checkpoint.parent / _NAME
    assert isinstance(strategy, ExportsModels)

    def replace() -> None:
        if folder.exists():
            shutil.rmtree(folder)
        strategy.export_hugging_face(checkpoint, folder)

    try:
        background.on_rank_zero(trainer, replace)
    except (StepError, ExchangeError) as error:
        rank_zero_warn(
            f"{folder} is not written: {error}. The checkpoint is whole; when the reason is gone, type "
            f"azureml-strategy consolidate {checkpoint} {folder} --format hf"
        )
        return
    rank_zero_info(f"{folder} can be opened by from_pretrained. It is made of {checkpoint.name}.")
