"""examples/huggingface: the same script alone, and in a job whose processes share the model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tests.preloaded import start_forked
from tests.tiny_model import save_tiny_model

from azureml_strategy.emulator import EmulatedJob, emulate

SCRIPT = Path(__file__).parents[2] / "examples" / "huggingface" / "train.py"


def test_shards_on_two_nodes_give_the_loss_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("azureml_strategy.emulator.processes._start", start_forked)
    save_tiny_model(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 60)
    losses = []
    for strategy, nodes, rows in (("ddp", 1, 4), ("azureml_model_parallel", 2, 2)):
        arguments = ["--model", "tiny", "--text", "text.txt", "--strategy", strategy, "--batch-size", str(rows)]
        command = [sys.executable, str(SCRIPT), *arguments, "--steps", "6"]
        assert emulate(EmulatedJob(command=command, nodes=nodes)) == 0
        (found,) = re.findall(r"6 steps by (\d+) process\(es\), final loss ([0-9.]+)", capsys.readouterr().out)
        losses.append((int(found[0]), float(found[1])))
    assert [processes for processes, _ in losses] == [1, 2]
    assert losses[1][1] == pytest.approx(losses[0][1], rel=1e-4)
