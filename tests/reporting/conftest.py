"""A store for the runs of these tests."""

from __future__ import annotations

from tests.tracking.conftest import _empty_store, client, store

__all__ = ["_empty_store", "client", "store"]  # fixtures
