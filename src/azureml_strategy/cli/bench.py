"""bench: measures the network between the processes of a job."""

from __future__ import annotations

import argparse
from pathlib import Path

from azureml_strategy.cli.verbs import Verbs, add_verb, fail, from_options

_DESCRIPTION = "Measure collectives between the processes of a job. Run it as each of them, as training is."
_EPILOG = """\
examples, each as the command of a job:
  azureml-strategy bench                                   # every collective, sizes up to what the network needs
  azureml-strategy bench --collectives all-reduce --sizes 1MB-256MB --expect 0.125
  azureml-strategy bench --pairs                           # which node or link is slow?
and here:
  azureml-strategy emulate --nodes 2 -- azureml-strategy bench
"""


def add_to(verbs: Verbs) -> None:
    """Add the verb and its options."""
    verb = add_verb(verbs, "bench", _run, "measure the network between a job's processes", _DESCRIPTION, _EPILOG)
    verb.add_argument("--collectives", metavar="NAMES", help="all-reduce,all-gather,... (default: all six)")
    verb.add_argument("--sizes", metavar="SIZES", help="message sizes: 64MB, 1MiB,64MiB or 1MB-256MB")
    verb.add_argument("--iterations", type=int, metavar="N", help="times each size is timed (gloo: 10, NCCL: 20)")
    verb.add_argument("--warmup", type=int, metavar="N", help="times it runs before (gloo: 2, NCCL: 5)")
    verb.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    verb.add_argument("--backend", help="nccl or gloo (default: nccl where there is a GPU)")
    verb.add_argument("--expect", type=float, metavar="GB/s", help="bus bandwidth to reach (default: the VM size's)")
    verb.add_argument("--pairs", action="store_true", help="measure every two nodes, and name the slow node or link")
    verb.add_argument(
        "--output", type=Path, metavar="FILE.json", default="outputs/bench.json", help="default: %(default)s"
    )
    verb.add_argument("--plot", type=Path, metavar="FILE.png", default="outputs/bench.png", help="default: %(default)s")
    verb.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="default: %(default)g")
    verb.add_argument("--no-mlflow", dest="mlflow", action="store_false", help="do not log into the job's MLflow run")


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.bench import BenchError, BenchOptions, parse_sizes, run_bench
    from azureml_strategy.cluster import LaunchError

    try:
        return run_bench(
            from_options(
                BenchOptions,
                options,
                collectives=options.collectives.split(",") if options.collectives else None,
                sizes=parse_sizes(options.sizes) if options.sizes else None,
                timeout_s=options.timeout,
            )
        )
    except (BenchError, LaunchError) as error:
        return fail(error)
