"""emulate -- COMMAND: runs a command on this machine as a job of several nodes."""

from __future__ import annotations

import argparse
import re

from azureml_strategy.cli.verbs import Verbs, add_verb, fail, from_options

_DESCRIPTION = "Run a command on emulated nodes, with the variables an Azure ML job gets."
_EPILOG = """\
examples:
  azureml-strategy emulate --nodes 2 --processes-per-node 2 -- python train.py
  azureml-strategy emulate --nodes 2 --distribution mpi -- azureml-strategy train resnet50_ddp
  sudo "$(command -v azureml-strategy)" emulate --nodes 2 --isolate --bandwidth 1gbit -- python train.py
  azureml-strategy emulate --nodes 2 --preempt-after 20s -- azureml-strategy train resnet50_ddp
"""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|)")


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    summary, usage = "run a command here as an Azure ML job would", "azureml-strategy emulate [options] -- COMMAND ..."
    verb = add_verb(verbs, "emulate", _run, summary, _DESCRIPTION, _EPILOG, usage=usage)
    verb.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (default 1)")
    verb.add_argument(
        "--processes-per-node", type=int, default=1, metavar="N", help="processes on each node (default 1)"
    )
    verb.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help="GPUs of each node (default: one for each process, or none where there are too few; 0 for CPUs)",
    )
    verb.add_argument(
        "--distribution",
        default="pytorch",
        help="pytorch (default), mpi, tensorflow, or none for a job without a distribution block",
    )
    verb.add_argument("--isolate", action="store_true", help="a network namespace for each node (Linux, root)")
    verb.add_argument("--bandwidth", metavar="RATE", help="rate of each node's link, such as 1gbit (with --isolate)")
    verb.add_argument(
        "--preempt-after",
        type=_seconds,
        metavar="TIME",
        help="announce the end of the last node after this time, such as 20s or 2m, end it, and start the job again",
    )
    verb.add_argument(
        "--preempt-notice",
        type=_seconds,
        default=30.0,
        metavar="TIME",
        help="between announcement and end (default 30s, Azure's least; with --preempt-after)",
    )
    verb.add_argument(
        "--nodes-after",
        type=int,
        metavar="N",
        help="nodes that the job comes back with (default: as many as before; with --preempt-after)",
    )
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each process runs")


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.emulator import EmulatedJob, EmulationError, Preemption, emulate

    after = options.preempt_after
    try:
        job = from_options(
            EmulatedJob,
            options,
            command=options.command[1:] if options.command[:1] == ["--"] else options.command,
            preemption=None if after is None else Preemption(after, options.preempt_notice),
        )
        return emulate(job)
    except EmulationError as error:
        return fail(error)


def _seconds(text: str) -> float:
    """Parse `20s`, `2m` or `20` into seconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time. Write 20s, 0.5s or 2m.")
    return float(found[1]) * (60 if found[2] == "m" else 1)
