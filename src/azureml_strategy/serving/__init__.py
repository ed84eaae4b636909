"""Predicts with a registered model behind an endpoint of Azure ML: scoring scripts `online.py` and `batch.py`."""

WEIGHTS = "weights.ckpt"
"""The file of a registered model, as `model register` writes it."""
MAX_SAMPLES = "AZUREML_STRATEGY_MAX_SAMPLES"
"""The variable of a deployment with the largest number of samples in one request or file; 256 without it."""
