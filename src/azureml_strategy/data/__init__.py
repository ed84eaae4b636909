"""Data sets: folders of images, handwritten digits that need no download, random images, and text read as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:  # `as`, so that type checkers take the names for public ones
    from azureml_strategy.data.chat import ChatDataModule as ChatDataModule
    from azureml_strategy.data.digits import DigitsDataModule as DigitsDataModule
    from azureml_strategy.data.folders import DataFolderError as DataFolderError
    from azureml_strategy.data.gpu_decoding import NvjpegDataModule as NvjpegDataModule
    from azureml_strategy.data.images import EvaluationImages as EvaluationImages
    from azureml_strategy.data.images import ImageFolder as ImageFolder
    from azureml_strategy.data.images import TrainingImages as TrainingImages
    from azureml_strategy.data.modules import ImageFolderDataModule as ImageFolderDataModule
    from azureml_strategy.data.node_cache.protocol import CacheSettings as CacheSettings
    from azureml_strategy.data.sampler import EvaluationSampler as EvaluationSampler
    from azureml_strategy.data.sampler import PlannedLoader as PlannedLoader
    from azureml_strategy.data.sampler import ResumableLoader as ResumableLoader
    from azureml_strategy.data.sampler import ResumableSampler as ResumableSampler
    from azureml_strategy.data.sampler import TrainingSampler as TrainingSampler
    from azureml_strategy.data.sampler import WindowSampler as WindowSampler
    from azureml_strategy.data.shard_index import ShardIndexError as ShardIndexError
    from azureml_strategy.data.sharded_images import ShardedImages as ShardedImages
    from azureml_strategy.data.storage import StorageError as StorageError
    from azureml_strategy.data.synthetic import SyntheticDataModule as SyntheticDataModule
    from azureml_strategy.data.text import SequenceSampler as SequenceSampler
    from azureml_strategy.data.text import TextDataModule as TextDataModule
    from azureml_strategy.data.text import TokenSequences as TokenSequences
    from azureml_strategy.data.text import count_tokens as count_tokens
    from azureml_strategy.data.tokens import CorpusError as CorpusError
    from azureml_strategy.data.unreadable import UnreadableImagesError as UnreadableImagesError

_MODULES = {
    "chat": "ChatDataModule",
    "digits": "DigitsDataModule",
    "folders": "DataFolderError",
    "gpu_decoding": "NvjpegDataModule",
    "images": "EvaluationImages ImageFolder TrainingImages",
    "modules": "ImageFolderDataModule",
    "node_cache.protocol": "CacheSettings",
    "sampler": "EvaluationSampler PlannedLoader ResumableLoader ResumableSampler TrainingSampler WindowSampler",
    "shard_index": "ShardIndexError",
    "sharded_images": "ShardedImages",
    "storage": "StorageError",
    "synthetic": "SyntheticDataModule",
    "text": "SequenceSampler TextDataModule TokenSequences count_tokens",
    "tokens": "CorpusError",
    "unreadable": "UnreadableImagesError",
}
_MODULE_OF = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)

__getattr__ = lazy_attributes(__name__, _MODULE_OF)
