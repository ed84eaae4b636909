"""Models of transformers: loading them in parts, adapters, and folders that `from_pretrained` opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.huggingface.loading import load_pretrained
    from azureml_strategy.huggingface.sources import PretrainedModelError
    from azureml_strategy.huggingface.token_loss import tokens_per_loss

__all__ = ["PretrainedModelError", "load_pretrained", "tokens_per_loss"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "PretrainedModelError": "azureml_strategy.huggingface.sources",
        "load_pretrained": "azureml_strategy.huggingface.loading",
        "tokens_per_loss": "azureml_strategy.huggingface.token_loss",
    },
)
