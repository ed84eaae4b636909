"""Data sets: folders of images, handwritten digits that need no download, random images, and text read as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.data.chat import ChatDataModule
    from azureml_strategy.data.digits import DigitsDataModule
    from azureml_strategy.data.folders import DataFolderError
    from azureml_strategy.data.gpu_decoding import NvjpegDataModule
    from azureml_strategy.data.images import EvaluationImages, ImageFolder, TrainingImages, UnreadableImagesError
    from azureml_strategy.data.modules import ImageFolderDataModule
    from azureml_strategy.data.node_cache.client import CacheSettings
    from azureml_strategy.data.sampler import (
        EvaluationSampler,
        PlannedLoader,
        ResumableLoader,
        ResumableSampler,
        TrainingSampler,
        WindowSampler,
    )
    from azureml_strategy.data.shard_index import ShardIndexError
    from azureml_strategy.data.sharded_images import ShardedImages
    from azureml_strategy.data.storage import StorageError
    from azureml_strategy.data.synthetic import SyntheticDataModule
    from azureml_strategy.data.text import SequenceSampler, TextDataModule, TokenSequences, count_tokens
    from azureml_strategy.data.tokens import CorpusError

__all__ = [
    "CacheSettings",
    "ChatDataModule",
    "CorpusError",
    "DataFolderError",
    "DigitsDataModule",
    "EvaluationImages",
    "EvaluationSampler",
    "ImageFolder",
    "ImageFolderDataModule",
    "NvjpegDataModule",
    "PlannedLoader",
    "ResumableLoader",
    "ResumableSampler",
    "SequenceSampler",
    "ShardIndexError",
    "ShardedImages",
    "StorageError",
    "SyntheticDataModule",
    "TextDataModule",
    "TokenSequences",
    "TrainingImages",
    "TrainingSampler",
    "UnreadableImagesError",
    "WindowSampler",
    "count_tokens",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "CacheSettings": "azureml_strategy.data.node_cache.client",
        "StorageError": "azureml_strategy.data.storage",
        "ChatDataModule": "azureml_strategy.data.chat",
        "CorpusError": "azureml_strategy.data.tokens",
        "DigitsDataModule": "azureml_strategy.data.digits",
        "DataFolderError": "azureml_strategy.data.folders",
        "EvaluationImages": "azureml_strategy.data.images",
        "ImageFolder": "azureml_strategy.data.images",
        "TrainingImages": "azureml_strategy.data.images",
        "ImageFolderDataModule": "azureml_strategy.data.modules",
        "NvjpegDataModule": "azureml_strategy.data.gpu_decoding",
        "PlannedLoader": "azureml_strategy.data.sampler",
        "ResumableLoader": "azureml_strategy.data.sampler",
        "ResumableSampler": "azureml_strategy.data.sampler",
        "EvaluationSampler": "azureml_strategy.data.sampler",
        "TrainingSampler": "azureml_strategy.data.sampler",
        "WindowSampler": "azureml_strategy.data.sampler",
        "ShardedImages": "azureml_strategy.data.sharded_images",
        "ShardIndexError": "azureml_strategy.data.shard_index",
        "SyntheticDataModule": "azureml_strategy.data.synthetic",
        "TokenSequences": "azureml_strategy.data.text",
        "count_tokens": "azureml_strategy.data.text",
        "TextDataModule": "azureml_strategy.data.text",
        "SequenceSampler": "azureml_strategy.data.text",
        "UnreadableImagesError": "azureml_strategy.data.images",
    },
)
