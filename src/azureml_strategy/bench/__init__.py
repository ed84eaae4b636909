"""The network benchmark: it measures collectives or pairs of nodes, judges the bandwidth and records the results."""

from __future__ import annotations

from azureml_strategy.bench.options import BenchError, BenchOptions, parse_sizes
from azureml_strategy.bench.run import run_bench

__all__ = ["BenchError", "BenchOptions", "parse_sizes", "run_bench"]
