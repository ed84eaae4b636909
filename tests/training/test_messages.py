"""What is wrong with a recipe, its files or its folder: one sentence, exit code 2, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.training.conftest import COMMAND, TINY, run

CASES: dict[str, tuple[list[str], dict[str, str | bytes], str]] = {
    "a base.yaml that starts from itself": (
        ["mine.yaml"],
        {"mine.yaml": "defaults: [resnet50_synthetic, _self_]\n", "base.yaml": "defaults: [resnet50_synthetic]\n"},
        "a file starts from itself. {folder} has base.yaml, and Hydra takes this in place of",
    ),
    "a base.yaml of another kind": (
        ["mine.yaml"],
        {"mine.yaml": "defaults: [{model: resnet50}, base, _self_]\n", "base.yaml": "vars: {a: 1}\n"},
        "has no data and no trainer and no strategy and no tracking. {folder} has base.yaml, and",
    ),
    "no defaults": (["mine.yaml"], {"mine.yaml": "model: {a: 1}\n"}, "write `defaults: [base_run, _self_]` at its top"),
    "an empty recipe": (["mine.yaml"], {"mine.yaml": ""}, "has no model and no data"),
    "no text": (["mine.yaml"], {"mine.yaml": b"\xff\xfe\x00"}, "mine.yaml is no text that can be read"),
    "a checkpoint of random bytes": (
        ["resnet50_synthetic", "resume=last.ckpt"],
        {"last.ckpt": b"\x01\x02 no checkpoint"},
        "resume=last.ckpt, but this is no checkpoint",
    ),
    "a file in the way of the output": (
        ["resnet50_synthetic"],
        {"outputs": "a file"},
        "but {folder}/outputs is no folder. Go to another folder, or name one: hydra.run.dir=FOLDER",
    ),
    "no data": (["resnet50_ddp", "data.root=/nope"], {}, "in /nope, which is no folder that there is. Leave data.root"),
    "no images": (["resnet50_imagenet", "data.root=/nope"], {}, "There is no data folder /nope"),
    "what Lightning refuses": (["resnet50_synthetic", "trainer.precision=12"], {}, "Precision 12 is invalid"),
    "a reference to nothing": (["resnet50_synthetic", "model.momentum=${nope.a}"], {}, "nope"),
    "a constructor that refuses": (
        ["resnet50_synthetic", "data.batch_size=0"],
        {},
        "data cannot be made. ValueError: ",
    ),
    "no such recipe": (["base_rum"], {}, "Did you mean 'base_run'"),
}


SMALL = ("a checkpoint of random bytes", "a reference to nothing")  # those that come near to training


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_in_a_sentence(case: str, tmp_path: Path) -> None:
    words, files, expected = CASES[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    done = run(COMMAND, "train", *words, *(TINY if case in SMALL else []), check=False)
    assert done.returncode == 2, done.stdout
    assert "azureml-strategy: " in done.stdout
    assert expected.format(folder=tmp_path) in done.stdout, done.stdout
    assert "Traceback" not in done.stdout
    assert "Error executing job" not in done.stdout
    assert len(done.stdout.splitlines()) < 15, done.stdout


def test_ctrl_c_while_it_imports(tmp_path: Path) -> None:
    """A module that is imported last, and says that it is, stands for the seconds of torch's and Lightning's import."""
    (tmp_path / "hydra.py").write_text(
        "import time\nprint('importing', flush=True)\nwhile True:\n    time.sleep(0.05)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, COMMAND, "train", "resnet50_synthetic"],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "azureml-strategy: stopped by Ctrl-C.\n"
