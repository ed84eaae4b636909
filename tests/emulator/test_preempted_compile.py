"""A node that is taken away from a compiled training: its next one compiles nothing."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from tests.emulated import SHARED_MACHINE
from tests.multiprocess.conftest import SCRIPTS

from azureml_strategy.cli import main
from azureml_strategy.emulator import processes


@pytest.mark.exhaustive
def test_the_next_attempt_compiles_nothing(
    store: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, results = tmp_path / "root" / "compile_cache" / "node0.bin", tmp_path / "results"

    def now() -> float:
        """The power stays until there is something that the next attempt can use."""
        return time.monotonic() if kept.exists() else 0.0

    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=time.sleep, monotonic=now))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for name, value in {
        **SHARED_MACHINE,
        "RESULTS": str(results),
        "PYTHONPATH": str(SCRIPTS.parents[2]),  # of `tests`, which a fresh interpreter does not know
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    train = [sys.executable, str(SCRIPTS / "compile_cache.py"), str(tmp_path / "root"), "ddp", "taken", "1.0"]
    assert main(["emulate", "--preempt-after", "0s", "--preempt-notice", "0s", "--", *train]) == 0
    output = capsys.readouterr().out
    assert "node 0 was taken away. The job starts again: same run, attempt 1, 1 node(s)." in output
    assert "Loaded the compiled code of an earlier attempt" in output
    (told,) = (json.loads(each.read_text()) for each in results.glob("*.json"))
    assert told["attempt"] == 1
    assert "fxgraph_cache_miss" not in told["inductor"]
    assert (told["inductor"]["fxgraph_cache_hit"], told["aot_autograd"]["autograd_cache_hit"]) == (2, 1)
