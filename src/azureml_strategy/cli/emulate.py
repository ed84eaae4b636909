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
  azureml-strategy emulate --pretend-ranks 64 -- python train.py
"""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|)")


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    summary, usage = "run a command here as an Azure ML job would", "azureml-strategy emulate [options] -- COMMAND ..."
    verb = add_verb(verbs, "emulate", _run, summary, _DESCRIPTION, _EPILOG, usage=usage)
    verb.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (default 1)")
    verb.add_argument(
        "--processes-per-node",
        type=int,
        metavar="N",
        help="processes on each node (default 1; 8 with --pretend-ranks)",
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
    _add_preemption(verb)
    verb.add_argument(
        "--pretend-ranks",
        type=int,
        metavar="N",
        help="try whether it starts as N ranks (8 a node, or --processes-per-node): a few of them take three steps, "
        "compute nothing large, and tell what they hold",
    )
    verb.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what each process runs")


def _add_preemption(verb: argparse.ArgumentParser) -> None:
    """Add how the job is preempted, and how it comes back."""
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


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.emulator import EmulatedJob, EmulationError, Preemption, emulate

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.pretend_ranks is not None:
        return _pretend(command, options)
    after = options.preempt_after
    try:
        job = from_options(
            EmulatedJob,
            options,
            command=command,
            processes_per_node=1 if options.processes_per_node is None else options.processes_per_node,
            preemption=None if after is None else Preemption(after, options.preempt_notice),
        )
        return emulate(job)
    except EmulationError as error:
        return fail(error)


def _pretend(command: list[str], options: argparse.Namespace) -> int:
    """Try ranks of a job that is too large for this machine. Returns 0 if they start, else 1."""
    from azureml_strategy.planning.errors import PlanError
    from azureml_strategy.planning.preflight import try_command

    others = ("nodes", "isolate", "bandwidth", "preempt_after", "nodes_after", "gpus_per_node")
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(options, name) not in (None, False, 1)]
    ranks = options.pretend_ranks
    each = options.processes_per_node or min(8, max(ranks, 1))
    try:
        if given:
            raise PlanError(f"--pretend-ranks starts no job on this machine. Leave {' and '.join(given)} out.")
        if ranks < 1 or ranks % each:
            raise PlanError(
                f"--pretend-ranks {ranks} cannot be shared out to nodes of {each} processes. Use a multiple of {each}, "
                "or write --processes-per-node."
            )
        preflight = try_command(command, ranks // each, each, options.distribution)
    except PlanError as error:
        return fail(error)
    print("\n".join(preflight.lines()))
    return 0 if preflight.starts else 1


def _seconds(text: str) -> float:
    """Parse `20s`, `2m` or `20` into seconds."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time. Write 20s, 0.5s or 2m.")
    return float(found[1]) * (60 if found[2] == "m" else 1)
