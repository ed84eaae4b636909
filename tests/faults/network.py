"""A network between nodes of their own, which is cut for a while or for good."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.faults.fault import WELL, Attempt, Fault
from tests.faults.orders import Order

from azureml_strategy.emulator import EmulationError
from azureml_strategy.emulator.nodes import IsolatedNodes

# Shorter than the collectives' time limit: TCP sends again what was lost.
_BLIP_SECONDS = (0.2, 2.0)


def why_not() -> str:
    """Why there can be no such nodes here; empty where there can."""
    try:
        with IsolatedNodes(1, None):
            return ""
    except EmulationError as error:
        return str(error)


@dataclass(frozen=True)
class NetworkFault(Fault):
    """The cable is back when the attempt is over.

    Attributes:
        mend: puts it back.
    """

    mend: tuple[str, ...] = ()

    @contextmanager
    def around(self, attempt: Attempt) -> Iterator[None]:
        yield
        subprocess.run(self.mend, check=True)


def cut(moments: random.Random, nodes: IsolatedNodes, ranks: int) -> Fault:
    """The last node's cable is pulled: no process of it hears or says anything any more."""
    down, up = tuple(nodes.cut_command(ranks - 1)), tuple(nodes.mend_command(ranks - 1))
    order = Order("step", moments.randint(1, 16), (0,), command=down)
    return NetworkFault("network", f"network cut at step {order.occurrence}", (order,), None, up)


def blip(moments: random.Random, nodes: IsolatedNodes, ranks: int) -> Fault:
    """The same, and soon put back."""
    down, up = tuple(nodes.cut_command(ranks - 1)), tuple(nodes.mend_command(ranks - 1))
    seconds = round(moments.uniform(*_BLIP_SECONDS), 2)
    script = f"{' '.join(down)} && (sleep {seconds}; {' '.join(up)}) &"  # training goes on meanwhile
    order = Order("step", moments.randint(1, 16), (0,), command=("sh", "-c", script))
    name = f"network cut for {seconds} s at step {order.occurrence}"
    return NetworkFault("network", name, (order,), WELL, up)
