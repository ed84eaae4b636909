"""Renders jobs with a cache of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from azureml_strategy.jobs import job_yaml, render_job

SIZE = "cluster=nd96isr_h100_v5"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where build folders and prices are kept: not in the home of whoever runs the tests."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def rendered(recipe: str, *overrides: str, name: str | None = None) -> dict[str, Any]:
    """The job as the service's schema has it."""
    job: dict[str, Any] = yaml.safe_load(job_yaml(render_job(recipe, overrides, name)))
    return job


def own_recipe(path: str, text: str = "") -> str:
    """A recipe of the user's below the working folder."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# Mine.\ndefaults: [resnet50_ddp, _self_]\n{text}\n")
    return path
