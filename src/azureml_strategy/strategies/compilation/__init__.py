"""Training with compiled modules: `compile=blocks|whole|off` of strategies, and compiled code that outlives a node."""

from azureml_strategy.strategies.compilation.compilation import Compilation, Compile

__all__ = ["Compilation", "Compile"]
