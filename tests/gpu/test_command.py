"""How cells are judged and processes are ended, without a training."""

from __future__ import annotations

import copy
import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from tests.gpu.agreement import judge
from tests.gpu.cells import drawn_on_cpu
from tests.gpu.matrix import left
from tests.gpu.parts import NEEDS, matrix_part
from tests.gpu.running import Ended, Machine, program
from tests.gpu.started import ids_below, wait_for_end
from tests.gpu.watching import NoSynchronisation

GOOD: dict[str, Any] = {
    "losses": [1.4, 1.0, 0.7, 0.5],
    "val_loss": 0.4,
    "buffers": {
        "running_mean": {"values": [0.5, -0.25], "type": "torch.float32"},
        "mean": {"values": [0.301], "type": "torch.float32"},
    },
}
BATCH_NORM = ("zero_1", "bf16-mixed", "batch_norm")


def verdict(changes: dict[str, Any], cell: tuple[str, str, str] = BATCH_NORM) -> tuple[bool, str]:
    """Of a rank whose results differ from stock Lightning's by some entries."""
    ours = copy.deepcopy(GOOD) | changes
    ranks = [{f"lightning_ddp/{cell[1]}/{cell[2]}": GOOD, "/".join(cell): ours}]
    (found,) = judge({1: ranks}, [cell])
    return found.right, found.words


def test_equal_numbers_agree() -> None:
    assert verdict({}) == (True, "0.0e+00")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": [1.4, 1.0, 0.7, 0.51]}, "losses [1.4, 1.0, 0.7, 0.51, 0.4]"),
        ({"losses": [1.4, 1.0, 0.7, float("nan")]}, "nan"),
        ({"val_loss": 0.41}, "0.41]"),
        ({"error": "RuntimeError: mat1", "steps": 0}, "after 0 steps: RuntimeError: mat1"),
        (
            {"buffers": GOOD["buffers"] | {"running_mean": {"values": [0.5, -0.3], "type": "torch.float32"}}},
            "1.0e-01 away",
        ),
        (
            {"buffers": GOOD["buffers"] | {"running_mean": {"values": [0.5, -0.25], "type": "torch.bfloat16"}}},
            "kept in",
        ),
        ({"buffers": GOOD["buffers"] | {"mean": {"values": [0.3008], "type": "torch.float32"}}}, "mean is"),
        ({"buffers": {"mean": GOOD["buffers"]["mean"]}}, "no running_mean"),
    ],
)
def test_what_differs_is_told(changes: dict[str, Any], words: str) -> None:
    right, told = verdict(changes)
    assert not right
    assert words in told


def test_rounding_of_bfloat16_is_allowed_and_that_of_float32_is_less() -> None:
    slightly = {"losses": [1.4, 1.001, 0.701, 0.501]}
    assert verdict(slightly)[0]
    assert not verdict(slightly, ("zero_1", "32-true", "batch_norm"))[0]


def test_an_oracle_that_does_not_learn_proves_nothing() -> None:
    still = GOOD | {"losses": [1.4, 1.4, 1.4, 1.4]}
    cell = "/".join(BATCH_NORM)
    (found,) = judge({1: [{"lightning_ddp/bf16-mixed/batch_norm": still, cell: still}]}, [BATCH_NORM])
    assert not found.right
    assert "learns too little" in found.words


def test_a_refusal_names_the_precision_before_the_first_step() -> None:
    cell = ("pipeline", "16-mixed", "plain")
    assert verdict({"error": "PipelineError: precision='16-mixed': no float16", "steps": 0}, cell)[0]
    assert not verdict({"error": "PipelineError: precision='16-mixed': no float16", "steps": 1}, cell)[0]
    assert not verdict({"error": "RuntimeError: expected Half", "steps": 0}, cell)[0]
    assert not verdict({}, cell)[0], "it should have been refused"


def test_a_rank_that_ended_early_is_told_and_its_cell_is_not_run_again() -> None:
    name, oracle = "/".join(BATCH_NORM), "lightning_ddp/bf16-mixed/batch_norm"
    ranks: list[dict[str, Any]] = [{name: GOOD, oracle: GOOD}, {oracle: GOOD}]
    (found,) = judge({2: ranks}, [BATCH_NORM])
    assert found.words == "1 of 2 ranks did not run it to its end"
    assert left([BATCH_NORM], ranks) == [BATCH_NORM]
    ranks[0][name] = {"error": "RuntimeError: no", "steps": 0}
    assert left([BATCH_NORM], ranks) == []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine("cpu", tmp_path, time.monotonic() + 60, cores=2, gpus="")


def test_a_job_has_its_ranks_and_no_gpu(machine: Machine) -> None:
    code = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    ended = machine.run("ranks", [sys.executable, "-c", code], world=2)
    assert ended.failure == ""
    assert ended.output.split("\n")[::2] == ["0 2 ''", "1 2 ''"]


def test_a_rank_that_fails_ends_the_others(machine: Machine) -> None:
    code = "import os, time; int(os.environ['RANK']) or time.sleep(60); raise ValueError('the reason')"
    ended = machine.run("fails", [sys.executable, "-c", code], world=2)
    assert ended.codes == (-9, 1)
    assert not ended.late
    assert ended.failure == "exit codes (-9, 1): ValueError: the reason"


def test_what_takes_too_long_is_ended_with_its_children(machine: Machine, tmp_path: Path) -> None:
    child = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"
    code = "import subprocess, sys; print('started', flush=True); subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    (ids := tmp_path / "ids").mkdir()
    started: list[int] = []

    def stop_once_all_runs() -> None:
        try:
            started.extend(ids_below(ids, 1))
        finally:
            machine.stop()

    thread = threading.Thread(target=stop_once_all_runs)
    thread.start()
    machine.deadline = time.monotonic() + 100
    ended = machine.run("late", [sys.executable, "-c", code, child, str(ids)])
    thread.join()
    assert ended.late
    assert ended.failure == "it took too long: started"
    assert started
    wait_for_end(started)


def test_layouts_are_wrong_where_nobody_knows_what_gloo_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that ends late leaves no layout of two ranks unjudged, as one that answers may."""
    machine = Machine("cuda", tmp_path, time.monotonic() + 60, cores=2, gpus="0")
    monkeypatch.setattr(Machine, "run", lambda *_, **__: Ended((None, None), "", True))
    rows = {row.case: row.status for row in matrix_part(machine, 2, list(NEEDS))}
    assert rows == dict.fromkeys(NEEDS, "WRONG")


def test_a_collective_that_ends_the_process_leaves_out_those_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo's `send` of a GPU's tensor does so."""
    code = (
        "import os, runpy, sys, torch.distributed as dist; dist.send = lambda *_: os._exit(7);"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    started = Machine.run

    def run(machine: Machine, name: str, command: list[str], world: int = 1, **named: Any) -> Ended:
        if name != "gloo":
            return Ended((1,), "", False)
        return started(
            machine, name, [command[0], "-c", f"import sys; sys.argv = {command[1:-1]} + ['cpu']; {code}"], 2
        )

    monkeypatch.setattr(Machine, "run", run)
    machine = Machine("cuda", tmp_path, time.monotonic() + 60, cores=2, gpus="0")
    rows = {row.case: row.status for row in matrix_part(machine, 2, list(NEEDS)) if "/" not in row.case}
    assert rows == {"pipeline": "left out"}


def test_what_was_ended_late_has_failed_whatever_its_exit_code() -> None:
    assert Ended((0,), "started", late=True).failure == "it took too long: started"
    assert Ended((0,), "started", late=False).failure == ""


def test_nothing_starts_once_the_time_is_over(machine: Machine) -> None:
    machine.stop()
    ended = machine.run("late", [sys.executable, "-c", "open('started', 'w')"], world=2)
    assert ended.failure == "it took too long: the time was over before it could start"
    assert not (machine.folder / "late" / "started").exists()


def test_processes_find_modules_by_a_relative_path(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each runs in a folder of its own."""
    Path("site").mkdir()
    Path("site/of_a_wheel.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", "site")
    assert machine.run("path", [sys.executable, "-c", "import of_a_wheel"]).failure == ""


def test_the_program_of_unpacked_wheels_is_found_or_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install --target site` puts it into site/bin, and nothing beside Python or on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, "site"])
    with pytest.raises(FileNotFoundError, match=r"neither beside .*python, nor in the folder bin"):
        program.__wrapped__()
    installed = tmp_path / "site" / "bin" / "azureml-strategy"
    installed.parent.mkdir(parents=True)
    installed.touch(0o755)
    assert program.__wrapped__() == (str(tmp_path / "python"), str(installed))


def test_a_module_s_weights_are_drawn_on_the_cpu_whatever_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's generator gives other numbers. So each draw is into a tensor of the CPU's, and is copied."""
    held: list[torch.Tensor] = []
    draw = torch.Tensor.uniform_

    def watched(tensor: torch.Tensor, *arguments: float, **options: Any) -> torch.Tensor:
        held.append(tensor)
        return draw(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "uniform_", watched)
    torch.manual_seed(3)
    linear = drawn_on_cpu(lambda: torch.nn.Linear(4, 4))
    parameters = list(linear.parameters())
    assert len(held) == len(parameters) == 2
    assert not {each.data_ptr() for each in held} & {each.data_ptr() for each in parameters}
    assert {each.device.type for each in held} == {"cpu"}
    torch.manual_seed(3)
    assert all(map(torch.equal, parameters, torch.nn.Linear(4, 4).parameters()))
    with torch.device("meta"):
        assert drawn_on_cpu(lambda: torch.nn.Linear(4, 4)).weight.is_meta
    assert torch.Tensor.uniform_ is watched


@pytest.mark.parametrize("file", ["site-packages/deepspeed/engine.py", "mine.py"])
def test_each_line_that_waits_is_told_and_only_deepspeeds_are_allowed(
    file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch warns on a GPU; here the lines themselves do."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    code = compile("import warnings\nwarnings.warn('called a synchronizing CUDA operation')", f"/a/{file}", "exec")
    watch, module = NoSynchronisation(first=0, steps=2), MagicMock(device=torch.device("cuda"))
    watch.on_train_start(MagicMock(), module)
    for step in range(2):
        watch.on_train_batch_end(MagicMock(), module, None, None, step)
        exec(code)
    with nullcontext() if "deepspeed" in file else pytest.raises(RuntimeError, match="something waits"):
        watch.on_train_end(MagicMock(), module)
    assert f"waits for the GPU, 2 times: {'deepspeed/engine.py' if 'deepspeed' in file else '/a/mine.py'}:2 in " in (
        capsys.readouterr().out
    )
    assert modes == ["warn", "warn", "default"]


def test_what_lightning_sets_for_gpus_is_no_trace_of_a_test() -> None:
    """Each Trainer on GPUs does this; the fixture that looks for traces judges."""
    CUDAAccelerator.set_nvidia_flags(0)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
