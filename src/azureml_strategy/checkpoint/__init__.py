"""Ending a run, and going on with it later."""
