from __future__ import annotations

import json
import zlib
from collections import Counter
from pathlib import Path

import pytest
from tests.faults import oracle


def test_the_newest_whole_one(tmp_path: Path) -> None:
    """Whatever wrote it: the oracle reads the manifests by itself."""
    for attempt, step in ((1, 1), (2, 2), (1, 9)):
        _put(tmp_path, attempt, step)
    assert oracle.newest_whole(tmp_path) == "2.ckpt"
    (tmp_path / "2.ckpt").write_bytes(b"kontent")
    assert oracle.newest_whole(tmp_path) == "9.ckpt"
    damaged = tmp_path / "9.ckpt.manifest.json"
    damaged.write_text(damaged.read_text().replace('"step": 9', '"step": 8'))
    (tmp_path / "5.ckpt.manifest.json").write_bytes((tmp_path / "1.ckpt.manifest.json").read_bytes())
    (tmp_path / "6.ckpt.manifest.json").write_text("[]")
    (tmp_path / "7.ckpt.manifest.json").write_bytes(b"\xff{")
    assert oracle.newest_whole(tmp_path) == "1.ckpt"
    (tmp_path / "1.ckpt").unlink()
    assert oracle.newest_whole(tmp_path) is None


def _put(folder: Path, attempt: int, step: int) -> None:
    (folder / f"{step}.ckpt").write_bytes(b"content")
    files = {f"{step}.ckpt": {"size": 7, "crc32": zlib.crc32(b"content")}}
    manifest = {"name": f"{step}.ckpt", "step": step, "attempt": attempt, "saved_at": float(-step), "files": files}
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    content = {**manifest, "crc32": zlib.crc32(text.encode())}
    (folder / f"{step}.ckpt.manifest.json").write_text(json.dumps(content))


EXPECTED = {("loss", 1): {0.5}, ("loss", 2): {0.25}}


@pytest.mark.parametrize(
    ("found", "difference"),
    [
        ({("loss", 1): {0.5}}, "1 points missing, such as ('loss', 2)"),
        ({**EXPECTED, ("loss", 3): {0.1}}, "1 points not in the undisturbed run, such as ('loss', 3)"),
        ({**EXPECTED, ("loss", 2): {0.2500001}}, "1 points other values, such as ('loss', 2)"),
        ({**EXPECTED, ("loss", 2): {0.25, 0.3}}, "1 points other values, such as ('loss', 2)"),
    ],
)
def test_curves(found: oracle.Curve, difference: str) -> None:
    assert oracle.curve_differences(EXPECTED, EXPECTED) == []
    assert oracle.curve_differences(found, EXPECTED) == [difference]


def test_mlflow() -> None:
    often = Counter({("loss", 1): 1, ("loss", 2): 1})
    assert oracle.mlflow_differences({"loss": [(1, 0.5), (2, 0.25)]}, EXPECTED, often) == []
    again = oracle.mlflow_differences({"loss": [(1, 0.5), (2, 0.25), (2, 0.25)]}, EXPECTED, often)
    assert again == ["1 points logged again, such as ('loss', 2)"]


def test_results() -> None:
    expected = {0: {"step": 3, "weights": [0.1]}, 1: {"step": 3, "weights": [0.1]}}
    assert oracle.result_differences(expected, expected) == []
    other = {**expected, 1: {"step": 3, "weights": [0.1000001]}}
    assert oracle.result_differences(other, expected) == ["weights of rank 1"]
    assert oracle.result_differences({0: expected[0]}, expected) == ["ranks [0] have finished, not [0, 1]"]


@pytest.mark.parametrize("key", ["weights", "kept", "optimizers", "schedulers", "callbacks"])
def test_results_by_name(key: str) -> None:
    expected = {0: {key: {"first": "1", "second": "2"}}}
    assert oracle.result_differences(expected, expected) == []
    for other, what in (({"first": "1", "second": "3"}, "3, not 2"), ({"first": "1"}, "none, not 2")):
        differences = oracle.result_differences({0: {key: other}}, expected)
        assert differences == [f"{key} of rank 0: 1 of 2 differ, such as second ({what})"]
    assert oracle.result_differences({0: {key: {**expected[0][key], "third": "3"}}}, expected)


def _leave(folder: Path, batches: list[tuple[int, int, str]]) -> Path:
    folder.mkdir()
    (folder / "batches-0.jsonl").write_text("".join(json.dumps(batch) + "\n" for batch in batches))
    (folder / "curve.jsonl").write_text(json.dumps(["loss", 1, 0.5]) + "\n")
    return folder


@pytest.mark.parametrize(
    ("batches", "difference"),
    [
        ([(0, 0, "a"), (0, 1, "b"), (0, 1, "b")], None),
        ([(0, 0, "a"), (0, 1, "b"), (0, 1, "c")], "1 points other values, such as ('epoch 000', 1)"),
        ([(0, 0, "a")], "1 points missing, such as ('epoch 000', 1)"),
        (
            [(0, 0, "a"), (0, 1, "b"), (1, 0, "c")],
            "1 points not in the undisturbed run, such as ('epoch 001', 0)",
        ),
    ],
)
def test_batches(tmp_path: Path, batches: list[tuple[int, int, str]], difference: str | None) -> None:
    """A batch may be read again, and must be the same."""
    reference = _leave(tmp_path / "reference", [(0, 0, "a"), (0, 1, "b")])
    output = _leave(tmp_path / "output", batches)
    expected = [] if difference is None else [f"batches of rank 0: {difference}"]
    assert oracle.training_differences(output, reference, {0: {"step": 2}}, {0: {"step": 2}}) == expected


def test_warnings() -> None:
    said = "This loader cannot be resumed exactly: ..."
    assert oracle.warning_differences(["something else"], impossible=False) == []
    assert oracle.warning_differences([said, "something else"], impossible=True) == []
    assert oracle.warning_differences([said, said], impossible=True)
    assert oracle.warning_differences([said], impossible=False)
    assert oracle.warning_differences([], impossible=True)
