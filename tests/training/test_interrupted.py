"""`azureml-strategy train` outside a job: SIGTERM and Ctrl-C save, say how to go on, and end with the signal's code."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.preloaded import Forked
from tests.training.conftest import COMMAND, TINY, files, run

# Each batch takes a while; the file says that three are done, and `held` holds up the fourth for good.
SLOW = """
import time
from pathlib import Path
from lightning.pytorch import Callback

class Slow(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(0.05)
        if trainer.global_step >= 3:
            Path(f"training.{trainer.global_rank}").touch()
            while Path("held").exists():
                time.sleep(0.05)
"""
TRAIN = [
    *(COMMAND, "train", "resnet50_synthetic", *TINY, "data.steps_per_epoch=3000", "trainer.max_epochs=1"),
    *("tracking=console", "tracking.progress_bar=null", "checkpoint=best", "+callbacks.slow._target_=slow.Slow"),
]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Forked]:
    """Start the command, and wait until each of its ranks trains."""
    (tmp_path / "slow.py").write_text(SLOW)

    def started(ranks: int) -> Forked:
        environ = {**os.environ, "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(tmp_path)}
        process = Forked([*TRAIN, f"trainer.devices={ranks}"], environ, text=True)
        deadline = time.monotonic() + 200
        while len(list(tmp_path.glob("training.*"))) < ranks:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    return started


def test_sigterm_saves_and_the_command_it_names_goes_on(start: Callable[..., Forked], tmp_path: Path) -> None:
    process = start(1)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    (folder,) = files("outputs/*/*")
    assert output.count(f"Output folder: {tmp_path / folder}\n") == 1
    assert output.count(f"Checkpoints: {tmp_path / folder}/checkpoints\n") == 1
    (step,) = re.findall(r"All ranks have stopped: SIGTERM on rank 0, after step (\d+)", output)
    (command,) = re.findall(r"To go on from there: azureml-strategy (.*)", output)
    again = run(
        *(COMMAND, *shlex.split(command), f"trainer.max_steps={int(step) + 1}"), variables={"PYTHONPATH": str(tmp_path)}
    ).stdout
    assert f"Going on from {tmp_path / folder}/checkpoints/epoch=0-step={step}.ckpt: step {step}." in again
    assert "All ranks have stopped" not in again


def test_ctrl_c_reaches_all_processes_of_a_terminal(start: Callable[..., Forked]) -> None:
    process = start(2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert output.count("Press it again to end at once.") == 1
    assert len(re.findall(r"All ranks have stopped: Ctrl-C on rank \d, after step \d+", output)) == 1
    assert output.count("To go on from there: azureml-strategy train resnet50_synthetic ") == 1
    assert len(files("outputs/*/*/checkpoints/*.manifest.json")) == 1
    assert "Traceback" not in output


def test_a_second_ctrl_c_ends_at_once(start: Callable[..., Forked], tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    process = start(1)
    os.kill(process.pid, signal.SIGINT)
    while "Press it again" not in process.stdout.readline():
        assert process.poll() is None
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT, "a shell reports 130"
    assert files("outputs/*/*/checkpoints/*.manifest.json") == []
