"""The network benchmark: joins the job's processes, measures collectives or pairs of nodes, judges and records."""

from __future__ import annotations

from azureml_strategy.benching.errors import BenchError
from azureml_strategy.benching.options import BenchOptions
from azureml_strategy.benching.run import run_bench
from azureml_strategy.benching.sizes import parse_sizes

__all__ = ["BenchError", "BenchOptions", "parse_sizes", "run_bench"]
