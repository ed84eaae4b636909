"""consolidate CHECKPOINT OUTPUT: writes a checkpoint's weights as one file, or a folder for from_pretrained."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from azureml_strategy.cli.verbs import Verbs, add_checkpoint_options, add_verb, fail, from_options
from azureml_strategy.lazy import install_line

if TYPE_CHECKING:
    from torch import Tensor

_DESCRIPTION = """\
Write the weights of a checkpoint of any strategy into one file, or a transformers model of it into a folder that \
from_pretrained opens. Needs no GPU and one process. Runs no code that the checkpoint's files ask for: a file that \
does is refused."""
_EPILOG = """\
examples:
  azureml-strategy consolidate outputs/run/checkpoints/epoch=2-step=66.ckpt weights.ckpt
and then, in Python:
  model = YourModule.load_from_checkpoint("weights.ckpt")

for other programs, the weights alone, or a model that onnxruntime computes:
  azureml-strategy consolidate outputs/run/checkpoints/epoch=2-step=66.ckpt weights.safetensors --format safetensors
  azureml-strategy consolidate outputs/run/checkpoints/epoch=2-step=66.ckpt model.onnx --format onnx

a transformers model, or the adapters that peft has put around it:
  azureml-strategy consolidate outputs/run/checkpoints/epoch=2-step=66.ckpt folder --format hf
  azureml-strategy consolidate outputs/run/checkpoints/epoch=2-step=66.ckpt folder --format hf --merge
and then:
  model = AutoModelForCausalLM.from_pretrained("folder")
"""
# The formats that an option is for. An option that is not named here is for all.
_ABOUT_MODULE = ("lightning", "onnx")
_FORMATS_OF = {
    **dict.fromkeys(("module", "model", "merge", "dtype", "max_shard_size"), ("hf",)),
    **dict.fromkeys(("module_class", "input_shape", "input_dtype"), _ABOUT_MODULE),
    "code": ("onnx",),
}
_SHOWN = 3


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    summary = "write the weights of a checkpoint into one file, or a folder for from_pretrained"
    verb = add_verb(verbs, "consolidate", _run, summary, _DESCRIPTION, _EPILOG)
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="file or folder the Trainer wrote")
    verb.add_argument("output", type=Path, metavar="OUTPUT", help="file to write; with --format hf a folder")
    verb.add_argument(
        "--format",
        choices=("lightning", "safetensors", "onnx", "hf"),
        default="lightning",
        help="lightning (default): for load_from_checkpoint; hf: for from_pretrained",
    )
    verb.add_argument("--module", metavar="NAME", help="hf: which model, if the module has several")
    verb.add_argument(
        "--model", metavar="FOLDER_OR_ID", help="hf: where configuration, tokenizer and base are, if not as recorded"
    )
    verb.add_argument("--merge", action="store_true", default=None, help="hf: add adapters to the base's weights")
    verb.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="hf: as trained if left out")
    verb.add_argument("--max-shard-size", metavar="SIZE", help="hf: the largest file of weights, such as 5GB")
    verb.add_argument("--code", type=Path, metavar="FOLDER", help="onnx: where the module's class is (default: here)")
    add_checkpoint_options(verb)


def _run(options: argparse.Namespace) -> int | None:
    from azureml_strategy.checkpoint.formats import CheckpointFormatError

    for name, formats in _FORMATS_OF.items():
        if getattr(options, name) is not None and options.format not in formats:
            wanted = " or ".join(f"--format {each}" for each in formats)
            return fail(
                f"--{name.replace('_', '-')} is not for --format {options.format}. Add {wanted}, or leave it out."
            )
    if options.input_dtype and not options.input_shape:
        return fail("--input-dtype says nothing without --input-shape. Add --input-shape 3,32,32, or leave it out.")
    try:
        _WRITERS[options.format](options)
    except CheckpointFormatError as error:
        return fail(error)
    except ModuleNotFoundError as error:
        if options.format != "hf":
            raise
        return fail(f"--format hf needs {error.name}. Type {install_line('huggingface')}")
    return None


def _write_file(options: argparse.Namespace) -> None:
    from azureml_strategy.checkpoint.consolidate import consolidate
    from azureml_strategy.checkpoint.module_record import module_overrides
    from azureml_strategy.checkpoint.serialization import moved_hyperparameters

    overrides = module_overrides(options.module_class, options.input_shape, options.input_dtype)
    weights = consolidate(options.checkpoint, options.output, trust_pickles=options.trust_pickles, overrides=overrides)
    _print_written(options.output, weights)
    moved = moved_hyperparameters(options.output)
    if moved:
        print(
            f"Not in reach of load_from_checkpoint by itself: {', '.join(moved)}. Type load_from_checkpoint(path, "
            "**azureml_strategy.checkpoint.saved_hyperparameters(path))"
        )


def _write_safetensors(options: argparse.Namespace) -> None:
    from azureml_strategy.checkpoint.exports import write_safetensors

    weights = write_safetensors(options.checkpoint, options.output, trust_pickles=options.trust_pickles)
    _print_written(options.output, weights)


def _print_written(output: Path, weights: Mapping[str, Tensor]) -> None:
    numbers = sum(weight.numel() for weight in weights.values())
    print(f"{output}: {len(weights)} tensors, {numbers:,} numbers")


def _write_onnx(options: argparse.Namespace) -> None:
    from azureml_strategy.checkpoint.exports import INPUT_NAME, write_onnx
    from azureml_strategy.checkpoint.module_record import module_overrides

    shape = write_onnx(
        options.checkpoint,
        options.output,
        overrides=module_overrides(options.module_class, options.input_shape, options.input_dtype),
        code=options.code or Path.cwd(),
        trust_pickles=options.trust_pickles,
    )
    sizes = ", ".join("N" if size is None else str(size) for size in shape)
    print(f"{options.output}: {INPUT_NAME} ({sizes}), for any N")


def _write_folder(options: argparse.Namespace) -> None:
    from azureml_strategy.huggingface.export import ExportOptions, write_hugging_face

    chosen = from_options(ExportOptions, options, source=options.model, merge=bool(options.merge))
    exported = write_hugging_face(options.checkpoint, options.output, chosen)
    print(f"{options.output}: {exported.kind}, {exported.tensors} tensors, {exported.numbers:,} numbers")
    if exported.left:
        more = ", ..." if len(exported.left) > _SHOWN else ""
        names = ", ".join(exported.left[:_SHOWN])
        print(f"Not written: {len(exported.left)} weights of the module outside of it ({names}{more})")
    if not exported.tokenizer:
        print("Not written: a tokenizer, as the checkpoint has none. --model FOLDER takes the one of that folder")


_WRITERS = {"lightning": _write_file, "safetensors": _write_safetensors, "onnx": _write_onnx, "hf": _write_folder}
