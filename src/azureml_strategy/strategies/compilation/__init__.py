"""Compiles the parts of a module for the time of a fit: `strategy.compile=blocks|whole|off`."""

from azureml_strategy.strategies.compilation.compilation import Compilation, Compile

__all__ = ["Compilation", "Compile"]
