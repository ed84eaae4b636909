"""The cells that compile: how they are judged, and on a CPU one of each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gpu.compiling import COMPILED_LAYOUTS, cells, judge
from tests.gpu.matrix import read
from tests.multiprocess.conftest import RunJob, _empty_store, run_job

__all__ = ["_empty_store", "run_job"]  # fixtures
SCRIPT = Path(__file__).with_name("compiling.py")
EAGER: dict[str, Any] = {"losses": [4.2, 4.0, 3.9], "graphs": 0, "without_cuda_graph": 0, "said": []}
COMPILED = EAGER | {"graphs": 3}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": [4.2, 4.0, 3.91]}, "2.4e-03 from uncompiled, 3 graphs"),
        ({"losses": [4.2, 4.0, float("nan")]}, "nan from uncompiled"),
        ({"graphs": 0}, "nothing was compiled"),
        ({"said": ["`forward` could not be compiled"]}, "`forward` could not be compiled"),
        ({"error": "RuntimeError: no", "steps": 1}, "compiled, after 1 steps: RuntimeError: no"),
    ],
)
def test_what_compiling_changes_is_told(changes: dict[str, Any], words: str) -> None:
    right, told = judge(COMPILED | changes, EAGER, "32-true")
    assert not right
    assert told.startswith(words)


def test_rounding_is_allowed_in_16_bits() -> None:
    compiled = COMPILED | {"losses": [4.2, 4.0, 3.91]}
    learns = EAGER | {"losses": [4.2, 4.0, 3.8]}
    assert judge(COMPILED | {"losses": [4.2, 4.0, 3.81]}, learns, "16-mixed")[0] is False
    assert judge(COMPILED | {"losses": [4.2, 4.0, 3.807]}, learns, "16-mixed") == (
        True,
        "1.7e-03 from uncompiled, 3 graphs",
    )
    assert judge(compiled, EAGER, "32-true")[0] is False


def test_an_eager_training_that_does_not_learn_proves_nothing() -> None:
    still = EAGER | {"losses": [4.2, 4.2, 4.2]}
    assert judge(COMPILED | {"losses": still["losses"]}, still, "32-true")[1].startswith("it learns too little")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_cells_are_right_on_a_cpu(run_job: RunJob, tmp_path: Path) -> None:
    job = run_job(SCRIPT, tmp_path / "out", "--few", nodes=1, extra={"TORCHINDUCTOR_COMPILE_THREADS": "1"})
    (found,) = read(tmp_path / "out", 1)
    assert found.keys() == {"/".join(cell) for cell in cells(COMPILED_LAYOUTS, few=True)}, job.output
    assert {name: each["words"] for name, each in found.items() if not each["right"]} == {}
