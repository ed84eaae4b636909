"""Image networks and their LightningModule, which trains any other network from images to logits as well."""

from azureml_strategy.models.classifier import ImageClassifier
from azureml_strategy.models.resnet import Bottleneck, ResNet50
from azureml_strategy.models.schedule import scaled_learning_rate, warmup_cosine

__all__ = ["Bottleneck", "ImageClassifier", "ResNet50", "scaled_learning_rate", "warmup_cosine"]
