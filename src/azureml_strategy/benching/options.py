"""What to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from azureml_strategy.benching.errors import BenchError
from azureml_strategy.network.collectives import COLLECTIVES

BACKENDS = ("nccl", "gloo")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure, and where the results go; None leaves the choice to the benchmark.

    Attributes:
        collectives: names, in the order of the table; by default all.
        sizes: message sizes in bytes, ascending.
        iterations: how often each size is timed.
        warmup: how often it runs before that.
        dtype: of the elements.
        backend: `nccl` or `gloo`; by default NCCL where there is a GPU.
        timeout_s: how long to wait for the job's other processes, and for a collective, in seconds.
        expect: bus bandwidth to be reached by all-reduce, in GB/s; by default the VM size's.
        pairs: measure every two nodes instead of all together.
        output: JSON file.
        plot: PNG file.
        mlflow: whether to log into the job's MLflow run.

    Raises:
        BenchError: an unknown name, or a number that cannot be.
    """

    collectives: Sequence[str] | None = None
    sizes: Sequence[int] | None = None
    iterations: int | None = None
    warmup: int | None = None
    dtype: str = "float32"
    backend: str | None = None
    timeout_s: float = 600.0
    expect: float | None = None
    pairs: bool = False
    output: Path = Path("outputs/bench.json")
    plot: Path = Path("outputs/bench.png")
    mlflow: bool = True

    def __post_init__(self) -> None:
        if self.pairs and self.collectives is not None:
            raise BenchError("--pairs measures all-reduce. Leave --collectives out, or --pairs.")
        for name in self.collectives or ():
            _refuse_unknown("--collectives", name, tuple(COLLECTIVES))
        _refuse_unknown("--dtype", self.dtype, DTYPES)
        if self.backend is not None:
            _refuse_unknown("--backend", self.backend, BACKENDS)
        _refuse_below("--iterations", self.iterations, 1)
        _refuse_below("--warmup", self.warmup, 0)
        for option, value in (("--timeout", self.timeout_s), ("--expect", self.expect)):
            if value is not None and not 0 < value < float("inf"):
                raise BenchError(f"{option} {value:g} cannot be: give a number above 0.")


def _refuse_unknown(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise BenchError(f"{option}: there is no {name!r}. Use {', '.join(known)}.")


def _refuse_below(option: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise BenchError(f"{option} {value} is too few: give {least} or more.")
