"""What a fault is, and the attempt of a job that it happens to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.orders import Order

from azureml_strategy.emulator.nodes import IsolatedNodes

# How an attempt may end that nothing forces to end.
WELL = frozenset({0})


@dataclass
class Attempt:
    """One start of the job, as the faults make it.

    Attributes:
        ranks: how many.
        output: the folder that the job writes to, the same one in all attempts.
        environ: further variables of all ranks.
        rank_environ: further variables of single ranks.
        addresses: of the nodes, one for each rank.
        nodes: where they are isolated from one another, one for each rank.
        met: faults that have happened without an order: they say so themselves.
    """

    ranks: int
    output: Path
    addresses: list[str]
    environ: dict[str, str] = field(default_factory=dict)
    rank_environ: dict[int, dict[str, str]] = field(default_factory=dict)
    nodes: IsolatedNodes | None = None
    met: list[Fault] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"


@dataclass(frozen=True)
class Fault:
    """Something that happens to one attempt of a job, or right before it.

    Attributes:
        family: what kind of thing goes wrong.
        name: what it is, for people.
        orders: what ranks do in it.
        codes: exit codes that the attempt may end with; None for any.
    """

    family: str
    name: str
    orders: tuple[Order, ...] = ()
    codes: frozenset[int] | None = None

    @property
    def place(self) -> str:
        """Where training is when it happens; empty if before, or at no place that training knows."""
        return self.orders[0].place if self.orders else ""

    @contextmanager
    def around(self, attempt: Attempt) -> Iterator[None]:
        """What the attempt runs in: servers, damage done before."""
        yield
