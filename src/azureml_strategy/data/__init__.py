"""Data sets: folders of images, digits that need no download, random images; and text, read as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.data.corpus import CorpusError
    from azureml_strategy.data.digits import DigitsDataModule
    from azureml_strategy.data.folders import DataFolderError
    from azureml_strategy.data.images import EvaluationImages, ImageFolder, TrainingImages
    from azureml_strategy.data.modules import ImageFolderDataModule
    from azureml_strategy.data.position import ResumableLoader, ResumableSampler
    from azureml_strategy.data.sampler import EvaluationSampler, TrainingSampler
    from azureml_strategy.data.synthetic import SyntheticDataModule
    from azureml_strategy.data.text import TokenSequences, count_tokens
    from azureml_strategy.data.text_module import TextDataModule
    from azureml_strategy.data.text_order import SequenceSampler
    from azureml_strategy.data.unreadable import UnreadableImagesError

__all__ = [
    "CorpusError",
    "DataFolderError",
    "DigitsDataModule",
    "EvaluationImages",
    "EvaluationSampler",
    "ImageFolder",
    "ImageFolderDataModule",
    "ResumableLoader",
    "ResumableSampler",
    "SequenceSampler",
    "SyntheticDataModule",
    "TextDataModule",
    "TokenSequences",
    "TrainingImages",
    "TrainingSampler",
    "UnreadableImagesError",
    "count_tokens",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "CorpusError": "azureml_strategy.data.corpus",
        "DigitsDataModule": "azureml_strategy.data.digits",
        "DataFolderError": "azureml_strategy.data.folders",
        "EvaluationImages": "azureml_strategy.data.images",
        "ImageFolder": "azureml_strategy.data.images",
        "TrainingImages": "azureml_strategy.data.images",
        "ImageFolderDataModule": "azureml_strategy.data.modules",
        "ResumableLoader": "azureml_strategy.data.position",
        "ResumableSampler": "azureml_strategy.data.position",
        "EvaluationSampler": "azureml_strategy.data.sampler",
        "TrainingSampler": "azureml_strategy.data.sampler",
        "SyntheticDataModule": "azureml_strategy.data.synthetic",
        "TokenSequences": "azureml_strategy.data.text",
        "count_tokens": "azureml_strategy.data.text",
        "TextDataModule": "azureml_strategy.data.text_module",
        "SequenceSampler": "azureml_strategy.data.text_order",
        "UnreadableImagesError": "azureml_strategy.data.unreadable",
    },
)
