"""Hydra groups."""
