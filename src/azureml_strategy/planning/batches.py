"""Batches of a recipe whose data set is not here: the shapes that its configuration says, without numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from azureml_strategy.training.targets import locate

_PER_RANK = 64
"""Batches that an epoch has on each rank, so that schedules by epochs have steps."""


class ShapedData(LightningDataModule):
    """Samples that have shapes and no content, in a DataLoader as the real ones are.

    Args:
        kind: `images`, uint8 `(3, size, size)` with a label; `text`, tokens `(size,)` and their targets; or `chat`, a
            dictionary of them.
        size: width and height of an image, or tokens of a sequence.
        batch_size: samples of a batch.
        ranks: ranks of the run.
    """

    def __init__(self, kind: str, size: int, batch_size: int, ranks: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._samples = _Repeated(_SAMPLES[kind](size), batch_size * ranks * _PER_RANK)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._samples, batch_size=self.batch_size, drop_last=True)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._samples, batch_size=self.batch_size, drop_last=True)


class _Repeated(Dataset[Any]):
    def __init__(self, sample: Any, length: int) -> None:
        self._sample, self._length = sample, length

    def __len__(self) -> int:
        return self._length

    @override
    def __getitem__(self, place: int) -> Any:
        return self._sample


@dataclass(frozen=True)
class Shape:
    """What a data module's configuration tells of its samples.

    Attributes:
        kind: as in `ShapedData`, or `floats`, images that need no normalisation.
        size: the same.
    """

    kind: str
    size: int

    @property
    def tokens(self) -> int:
        """Tokens of a sample; 0 for images."""
        return self.size if self.kind in ("text", "chat") else 0

    def batch(self, samples: int) -> Any:
        """A batch of so many samples as a DataLoader collates it, on the meta device."""
        with torch.device("meta"):
            one = default_collate([_SAMPLES[self.kind](self.size)])
            return tree_map_only(Tensor, lambda each: each.new_empty((samples, *each.shape[1:])), one)


def shape_of(data: DictConfig) -> Shape | None:
    """Return the shape of a recipe's samples: of our data modules, else by the keys `image_size` or `sequence_length`.

    Args:
        data: the recipe's section.

    Returns:
        None if the section does not tell it.

    Raises:
        RecipeError: `_target_` names nothing.
    """
    kind = _kind_of(data) or ("floats" if data.get("image_size") else "text")
    size = data.get("image_size" if kind in ("images", "floats") else "sequence_length")
    return Shape(kind, int(size)) if size else None


def data_section(data: DictConfig, ranks: int) -> DictConfig:
    """Return the `data` section of a stand-in for a recipe's data module, which reads no data.

    A section is returned as it is if it needs no data set, and if it is of a module of the user's, whose batches the
    configuration does not tell.

    Args:
        data: the recipe's section.
        ranks: ranks of the run.
    """
    shape = shape_of(data) if _kind_of(data) else None
    if shape is None:
        return data
    return OmegaConf.create(
        {
            "_target_": f"{ShapedData.__module__}.{ShapedData.__name__}",
            "kind": shape.kind,
            "size": shape.size,
            "batch_size": data.batch_size,
            "ranks": ranks,
        }
    )


def _kind_of(data: DictConfig) -> str | None:
    """The kind of samples of one of our data modules that read a data set; None for others."""
    from azureml_strategy.data import ChatDataModule, ImageFolderDataModule, TextDataModule

    if OmegaConf.is_missing(data, "_target_"):
        return None
    target = locate("data", str(data._target_))
    kinds = {ImageFolderDataModule: "images", TextDataModule: "text", ChatDataModule: "chat"}
    ours = (word for known, word in kinds.items() if isinstance(target, type) and issubclass(target, known))
    return next(ours, None)


def _image(size: int) -> tuple[Tensor, int]:
    return torch.zeros((3, size, size), dtype=torch.uint8), 0


def _floats(size: int) -> tuple[Tensor, int]:
    return torch.zeros((3, size, size)), 0


def _text(size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)


def _chat(size: int) -> dict[str, Tensor]:
    tokens, targets = _text(size)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "shift_labels": targets}


_SAMPLES = {"images": _image, "floats": _floats, "text": _text, "chat": _chat}
