"""The network benchmark: joins the job's processes, measures collectives or pairs of nodes, judges and records."""

from __future__ import annotations

from azureml_strategy.bench.options import BenchError, BenchOptions, parse_sizes
from azureml_strategy.bench.run import run_bench

__all__ = ["BenchError", "BenchOptions", "parse_sizes", "run_bench"]
