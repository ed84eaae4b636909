"""How other ranks make up the same global batch, and why some cannot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

from azureml_strategy.checkpoint.global_batch import GlobalBatch
from azureml_strategy.checkpoint.resume import ResumeError

_SHOWN = 6


@dataclass(frozen=True)
class ElasticPlan:
    """A checkpoint's global batch, and the ranks that are to go on with it.

    Attributes:
        checkpoint: the path, for messages.
        saved: what its steps were made of.
        asked: what the Trainer and its data would make them of.
        ranks_per_replica: processes that read the same samples.
        ranks_per_node: processes on each node.
    """

    checkpoint: Path
    saved: GlobalBatch
    asked: GlobalBatch
    ranks_per_replica: int
    ranks_per_node: int

    def accumulated(self) -> GlobalBatch:
        """As many batches to a step as make the saved one's samples.

        Raises:
            ResumeError: no whole number of batches does.
        """
        accumulation, rest = divmod(self.saved.size, self.asked.round_size)
        if rest:
            raise self.refused(
                f"these ranks read {self.asked.round_size} at once, and no whole number of that makes {self.saved.size}"
            )
        return replace(self.asked, accumulation=accumulation)

    def cut(self, micro_batches: int) -> tuple[GlobalBatch, int]:
        """Batches of another size, cut into micro-batches of the same size.

        Args:
            micro_batches: pieces that a batch is to be cut into.

        Returns:
            The global batch, and the number of its pieces.

        Raises:
            ResumeError: no whole number of micro-batches makes the saved one's samples.
        """
        if self.asked.batch_size is None:
            raise self.refused("the data loader does not say how large its batches are, which a pipeline cuts")
        piece = max(1, self.asked.batch_size // micro_batches)
        number, rest = divmod(self.saved.size, piece * self.asked.replicas)
        if rest:
            once = f"these ranks read {piece * self.asked.replicas} with a micro-batch each"
            raise self.refused(f"{once}, and no whole number of that makes {self.saved.size}", piece)
        return replace(self.asked, batch_size=number * piece), number

    def epoch_batches(self, ratio: Fraction) -> int:
        """The batches of an epoch, which are no more samples than it had.

        Args:
            ratio: how many batches of a replica there are now for one there was.

        Raises:
            ResumeError: they are too few for one batch on each replica.
        """
        before = self.saved.epoch_batches or 0
        if before * ratio < 1:
            raise self.refused(f"an epoch, which had {before} batch(es), has too few samples for one on each rank")
        return math.floor(before * ratio)

    def refused(self, why: str, piece: int | None = None) -> ResumeError:
        """The reason in numbers, and every way out.

        Args:
            why: what is in the way.
            piece: samples of a micro-batch, where batches are cut.
        """
        size = f"{self.saved.size} {'batches' if self.asked.batch_size is None else 'samples'}"
        return ResumeError(
            f"{self.checkpoint} was written with {size} to an optimizer step: {self.saved}. Now there is {self.asked}, "
            f"and {why}. {self._ways(piece)} To go on with another global batch, write `global_batch=change`, or "
            "ElasticRestart(..., global_batch='change') in a script; `resume=never` starts anew."
        )

    def _ways(self, piece: int | None) -> str:
        ways = []
        units, rest = divmod(self.saved.size, piece or self.asked.batch_size or 1)
        others = [each for each in _divisors(units) if each != self.asked.replicas] if not rest else []
        if others:
            ways.append(f"with {_listed(others)} data-parallel rank(s){self._nodes(others)}")
        batch_size = self._largest_batch_size()
        if batch_size is not None and piece is None:
            ways.append(f"with a batch size of {batch_size} (data.batch_size={batch_size} in a recipe)")
        return f"Come back {', or '.join(ways)}." if ways else "No number of ranks fits these batches."

    def _nodes(self, replicas: Sequence[int]) -> str:
        ranks = [each * self.ranks_per_replica for each in replicas]
        nodes = [each // self.ranks_per_node for each in ranks if each % self.ranks_per_node == 0]
        return f", on {_listed(nodes)} node(s) of {self.ranks_per_node} process(es)" if nodes else ""

    def _largest_batch_size(self) -> int | None:
        """The largest one, up to the one there is, of which these ranks make the saved global batch."""
        share, rest = divmod(self.saved.size, self.asked.replicas)
        if self.asked.batch_size is None or rest:
            return None
        return max(each for each in _divisors(share) if each <= self.asked.batch_size)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _listed(numbers: Sequence[int]) -> str:
    """The largest ones: fewer ranks are seldom wanted."""
    *most, last = [str(each) for each in numbers[-_SHOWN:]]
    return f"{', '.join(most)} or {last}" if most else last
