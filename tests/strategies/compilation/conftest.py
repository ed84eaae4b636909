"""A compiler without graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from azureml_strategy.strategies.process_group import end_process_group


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No graphs of an earlier test; aot_eager, which traces as inductor does and makes no C++."""
    before = torch.compiler.get_default_backend()
    torch._dynamo.reset()
    torch.compiler.set_default_backend("aot_eager")
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ):  # Lightning writes ranks there
        yield
    end_process_group()
    torch.compiler.set_default_backend(before)
    torch._dynamo.reset()
