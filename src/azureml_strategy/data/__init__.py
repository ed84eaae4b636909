"""Data sets: folders of images, handwritten digits that need no download, random images, and text read as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.data.chat import ChatDataModule
    from azureml_strategy.data.digits import DigitsDataModule
    from azureml_strategy.data.folders import DataFolderError
    from azureml_strategy.data.images import EvaluationImages, ImageFolder, TrainingImages, UnreadableImagesError
    from azureml_strategy.data.modules import ImageFolderDataModule
    from azureml_strategy.data.sampler import EvaluationSampler, ResumableLoader, ResumableSampler, TrainingSampler
    from azureml_strategy.data.synthetic import SyntheticDataModule
    from azureml_strategy.data.text import SequenceSampler, TextDataModule, TokenSequences, count_tokens
    from azureml_strategy.data.tokens import CorpusError

__all__ = [
    "ChatDataModule",
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
        "ChatDataModule": "azureml_strategy.data.chat",
        "CorpusError": "azureml_strategy.data.tokens",
        "DigitsDataModule": "azureml_strategy.data.digits",
        "DataFolderError": "azureml_strategy.data.folders",
        "EvaluationImages": "azureml_strategy.data.images",
        "ImageFolder": "azureml_strategy.data.images",
        "TrainingImages": "azureml_strategy.data.images",
        "ImageFolderDataModule": "azureml_strategy.data.modules",
        "ResumableLoader": "azureml_strategy.data.sampler",
        "ResumableSampler": "azureml_strategy.data.sampler",
        "EvaluationSampler": "azureml_strategy.data.sampler",
        "TrainingSampler": "azureml_strategy.data.sampler",
        "SyntheticDataModule": "azureml_strategy.data.synthetic",
        "TokenSequences": "azureml_strategy.data.text",
        "count_tokens": "azureml_strategy.data.text",
        "TextDataModule": "azureml_strategy.data.text",
        "SequenceSampler": "azureml_strategy.data.text",
        "UnreadableImagesError": "azureml_strategy.data.images",
    },
)
