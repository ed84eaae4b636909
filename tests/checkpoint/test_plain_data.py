"""Checkpoints of values of all kinds, which a restart must be able to load."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.multiprocess.scripts.keeps import VALUES, fit, stop_and_go_on


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything writes goes away again
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize("kind", VALUES)
def test_a_restart_gives_back_what_was_kept(kind: str, tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, VALUES[kind], lambda: "auto")["wrong"] == []


def test_learning_rates_that_numpy_computed(tmp_path: Path) -> None:
    values = VALUES["numpy scalar"]
    whole, again = fit(tmp_path / "whole", values, "auto"), stop_and_go_on(tmp_path, values, lambda: "auto")
    assert (again["weights"], again["rates"]) == (whole["weights"], whole["rates"])
