"""Hugging Face models: what a strategy must know of them, loading, adapters and saving."""
