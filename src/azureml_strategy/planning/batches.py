"""Batches of a recipe whose data set is not here: the shapes that its configuration says, without numbers."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

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


def data_section(data: DictConfig, ranks: int) -> DictConfig:
    """Return the `data` section of a stand-in for a recipe's data module, which reads no data.

    A section is returned as it is if it needs no data set, and if it is of a module of the user's, whose batches the
    configuration does not tell.

    Args:
        data: the recipe's section.
        ranks: ranks of the run.
    """
    from hydra.utils import get_class

    from azureml_strategy.data import ChatDataModule, ImageFolderDataModule, TextDataModule

    kinds = {ImageFolderDataModule: "images", TextDataModule: "text", ChatDataModule: "chat"}
    if OmegaConf.is_missing(data, "_target_"):
        return data
    target = get_class(str(data._target_))
    kind = next((word for known, word in kinds.items() if issubclass(target, known)), None)
    if kind is None:
        return data
    return OmegaConf.create(
        {
            "_target_": f"{ShapedData.__module__}.{ShapedData.__name__}",
            "kind": kind,
            "size": data.image_size if kind == "images" else data.sequence_length,
            "batch_size": data.batch_size,
            "ranks": ranks,
        }
    )


def _image(size: int) -> tuple[Tensor, int]:
    return torch.zeros((3, size, size), dtype=torch.uint8), 0


def _text(size: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)


def _chat(size: int) -> dict[str, Tensor]:
    tokens, targets = _text(size)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "shift_labels": targets}


_SAMPLES = {"images": _image, "text": _text, "chat": _chat}
