"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

# A busy machine must not fail a test: there is nothing here whose speed matters.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
