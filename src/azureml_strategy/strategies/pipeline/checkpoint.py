"""Records the layout that wrote a checkpoint, in a file beside DeepSpeed's: how the module was cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from azureml_strategy.strategies.pipeline.partition import PipelineError

_LAYOUT = "pipeline.json"


@dataclass(frozen=True)
class PipelineLayout:
    """How a module was spread over the ranks.

    Attributes:
        bounds: stage i had the layers from the i-th number up to, not including, the next one.
        replicas: data-parallel size.
        zero_stage: 0 or 1.
        precision: as in `Trainer(precision=...)`.
        places: the name of each layer in the module; None for functions.
    """

    bounds: Sequence[int]
    replicas: int
    zero_stage: int
    precision: str
    places: Sequence[str | None]

    def write(self, checkpoint: Path) -> None:
        """Write the layout into a checkpoint's folder."""
        (checkpoint / _LAYOUT).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def read(checkpoint: Path) -> PipelineLayout:
        """Read the layout of a checkpoint.

        Raises:
            PipelineError: no pipeline wrote the checkpoint.
        """
        if not (checkpoint / _LAYOUT).is_file():
            raise PipelineError(
                f"{checkpoint} is no checkpoint of a pipeline: it has no {_LAYOUT}. Give the folder that the Trainer "
                "wrote under azureml_deepspeed_pipeline, or load the weights of another strategy into the module "
                "before training."
            )
        try:
            layout = PipelineLayout(**json.loads((checkpoint / _LAYOUT).read_text()))
            if not all(each is None or isinstance(each, str) for each in layout.places) or len(layout.bounds) < 2:
                raise ValueError("its layers have no names")
            return layout
        except (ValueError, TypeError, RecursionError) as error:
            raise PipelineError(
                f"{checkpoint / _LAYOUT} is damaged: {error!r:.200}. Use an earlier checkpoint, or copy this one again."
            ) from error

    def check(self, checkpoint: Path, training: bool) -> None:
        """Refuse a checkpoint of no pipeline, or that this layout cannot read; `training` needs optimizer states.

        Weights are stored by layer and fit any cut into as many stages or fewer. Optimizer states are stored by rank.
        """
        saved = PipelineLayout.read(checkpoint)
        if list(saved.places) != list(self.places):
            raise PipelineError(
                f"{checkpoint} has the layers {_listed(saved.places)}, but this module has {_listed(self.places)}. "
                "Build the module with the arguments it was trained with."
            )
        if len(self.bounds) > len(saved.bounds):
            stages, wrote = len(self.bounds) - 1, len(saved.bounds) - 1
            raise PipelineError(
                f"{checkpoint} was written by {wrote} stages, and there is nothing in it for the others of {stages}. "
                f"Use num_stages={wrote} or less."
            )
        if training and saved._optimizer_layout() != self._optimizer_layout():
            raise PipelineError(
                f"{checkpoint} was written by {saved._words()}, but this run has {self._words()}, and the optimizer's "
                "states are kept by rank. Resume with the same layout; or start from its weights alone: "
                f"azureml-strategy consolidate {checkpoint} weights.ckpt"
            )

    def _optimizer_layout(self) -> tuple[object, ...]:
        # in float32 without ZeRO, all replicas have equal states, so their number does not matter
        by_replica = self.zero_stage > 0 or self.precision != "32-true"
        # bfloat16 runs under ZeRO stage 1, whatever was asked for
        zero_stage = 1 if self.precision.startswith("bf16") else self.zero_stage
        return list(self.bounds), zero_stage, self.precision, self.replicas if by_replica else None

    def _words(self) -> str:
        return (
            f"{len(self.bounds) - 1} stages cut at layers {list(self.bounds)[1:-1]} x {self.replicas} replicas "
            f"(zero_stage={self.zero_stage}, precision={self.precision!r})"
        )


def _listed(places: Sequence[str | None]) -> str:
    return ", ".join(place for place in places if place is not None)
