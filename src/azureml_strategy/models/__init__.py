"""ResNet-50 and GPT, and LightningModules that train these, models of transformers and other networks."""

from azureml_strategy.interfaces import ChainLayer
from azureml_strategy.models.chain import build_chain, seeded
from azureml_strategy.models.classifier import ImageClassifier
from azureml_strategy.models.fine_tuning import FineTuner
from azureml_strategy.models.gpt import gpt_layers
from azureml_strategy.models.gpt_config import GPTConfig
from azureml_strategy.models.language_model import LanguageModel
from azureml_strategy.models.optimizer import scaled_learning_rate, warmup_cosine
from azureml_strategy.models.resnet import Bottleneck, ResNet50

__all__ = [
    "Bottleneck",
    "ChainLayer",
    "FineTuner",
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
