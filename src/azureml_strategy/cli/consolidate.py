"""consolidate CHECKPOINT OUTPUT: writes the weights of any strategy's checkpoint into one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from azureml_strategy.cli.verbs import Verbs, add_verb, fail

_EPILOG = """\
examples:
  azureml-strategy consolidate outputs/run/checkpoints/epoch=2-step=66.ckpt weights.ckpt
and then, in Python:
  model = YourModule.load_from_checkpoint("weights.ckpt")
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    verb = add_verb(
        verbs,
        "consolidate",
        _run,
        help="write the weights of a checkpoint into one file",
        description="Write the weights of a checkpoint of any strategy into one file. Needs no GPU and one process. "
        "Runs no code that the checkpoint's files ask for: a file that does is refused.",
        epilog=_EPILOG,
    )
    verb.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="file or folder the Trainer wrote")
    verb.add_argument("output", type=Path, metavar="OUTPUT", help="file to write")
    verb.add_argument(
        "--trust-pickles", action="store_true", help="run the code that the files ask for: you trust who wrote them"
    )


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.checkpoint.consolidate import consolidate
    from azureml_strategy.checkpoint.formats import CheckpointFormatError
    from azureml_strategy.checkpoint.plain_data import moved_hyperparameters

    try:
        weights = consolidate(options.checkpoint, options.output, trust_pickles=options.trust_pickles)
    except CheckpointFormatError as error:
        return fail(error)
    numbers = sum(weight.numel() for weight in weights.values())
    print(f"{options.output}: {len(weights)} tensors, {numbers:,} numbers")
    moved = moved_hyperparameters(options.output)
    if moved:
        print(
            f"Not in reach of load_from_checkpoint by itself: {', '.join(moved)}. Type load_from_checkpoint(path, "
            "**azureml_strategy.checkpoint.saved_hyperparameters(path))"
        )
    return 0
