"""Data sets: folders of images, digits that need no download, random images; and text, read as tokens."""

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
