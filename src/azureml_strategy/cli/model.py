"""model register: registers the weights of a run as a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from azureml_strategy.cli.verbs import Verbs, add_group, add_verb, add_workspace_options, client, print_text, refusing

_EPILOG = """\
examples:
  azureml-strategy model register resnet50 --job JOB
  azureml-strategy model register gpt --job JOB --checkpoint checkpoints/epoch=2-step=66.ckpt
  azureml-strategy model register resnet50 --path outputs/run/checkpoints/epoch=2-step=66.ckpt
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    group = add_group(verbs, "model", "register a trained model")
    register = add_verb(
        group,
        "register",
        _register,
        help="register the weights of a run",
        description="Register the weights of a finished job, or of a checkpoint here, as one file.",
        epilog=_EPILOG,
    )
    register.add_argument("name", metavar="NAME", help="of the model")
    source = register.add_mutually_exclusive_group(required=True)
    source.add_argument("--job", metavar="JOB", help="the job that trained it")
    source.add_argument("--path", type=Path, metavar="CHECKPOINT", help="a checkpoint here: file or folder")
    register.add_argument("--output", metavar="NAME", help="with --job: output with the checkpoints (default: run)")
    register.add_argument(
        "--checkpoint", metavar="PATH", help="which, in that output (default: the best, else the last)"
    )
    register.add_argument("--version", metavar="VERSION", help="default: the next number")
    register.add_argument(
        "--trust-pickles",
        action="store_true",
        help="run the code that the checkpoint's files ask for: you trust who wrote them",
    )
    add_workspace_options(register)


@refusing
def _register(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs.register import register_checkpoint, register_run
    from azureml_strategy.jobs.service_errors import JobError

    if options.path and (options.output or options.checkpoint):
        raise JobError(
            "--output and --checkpoint say what of a job is meant. Give --job JOB with them, or --path alone."
        )
    workspace = client(options)
    if options.job:
        model = register_run(
            workspace,
            options.name,
            options.job,
            output=options.output or "run",
            checkpoint=options.checkpoint,
            version=options.version,
            trust_pickles=options.trust_pickles,
        )
    else:
        model = register_checkpoint(
            workspace,
            options.name,
            options.path,
            version=options.version,
            trust_pickles=options.trust_pickles,
        )
    print_text(f"azureml:{model.name}:{model.version}  {model.description}")
    return 0
