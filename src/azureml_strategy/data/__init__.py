"""Image data sets: folders of files, handwritten digits that need no download, and random images."""

from azureml_strategy.data.digits import DigitsDataModule
from azureml_strategy.data.folders import DataFolderError
from azureml_strategy.data.images import EvaluationImages, ImageFolder, TrainingImages
from azureml_strategy.data.modules import ImageFolderDataModule
from azureml_strategy.data.sampler import EvaluationSampler, TrainingSampler
from azureml_strategy.data.synthetic import SyntheticDataModule
from azureml_strategy.data.unreadable import UnreadableImagesError

__all__ = [
    "DataFolderError",
    "DigitsDataModule",
    "EvaluationImages",
    "EvaluationSampler",
    "ImageFolder",
    "ImageFolderDataModule",
    "SyntheticDataModule",
    "TrainingImages",
    "TrainingSampler",
    "UnreadableImagesError",
]
