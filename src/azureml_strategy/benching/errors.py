"""What stops the benchmark before it measures."""

from __future__ import annotations


class BenchError(ValueError):
    """The command line or the job cannot be measured as asked."""
