"""ResNet-50 and GPT, and LightningModules that train these and other networks for the same tasks."""

from azureml_strategy.models.chain import ChainLayer, build_chain, seeded
from azureml_strategy.models.classifier import ImageClassifier
from azureml_strategy.models.gpt import gpt_layers
from azureml_strategy.models.gpt_config import GPTConfig
from azureml_strategy.models.language_model import LanguageModel
from azureml_strategy.models.optimizer import scaled_learning_rate, warmup_cosine
from azureml_strategy.models.resnet import Bottleneck, ResNet50

__all__ = [
    "Bottleneck",
    "ChainLayer",
    "GPTConfig",
    "ImageClassifier",
    "LanguageModel",
    "ResNet50",
    "build_chain",
    "gpt_layers",
    "scaled_learning_rate",
    "seeded",
    "warmup_cosine",
]
