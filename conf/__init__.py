"""Hydra groups: model, data, strategy, trainer, tracking, checkpoint, cluster, job."""
