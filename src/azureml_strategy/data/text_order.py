"""Which sequences each process reads, and in which order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from azureml_strategy.data.position import ResumableSampler


class SequenceSampler(ResumableSampler):
    """Deals out the sequences of a text. Seed and epoch are mixed: no order comes back under another seed."""

    @override
    def order(self) -> Tensor:
        # torch's own rule, seed + epoch, would give epoch 1 of seed 0 the order of epoch 0 of seed 1
        mixed = int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1)[0])
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(mixed))
