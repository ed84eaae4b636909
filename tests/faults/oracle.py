"""Judges what a disturbed run has left, by what a user sees of it: folders, curves, MLflow. It uses nothing of ours."""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.multiprocess.scripts.noisy import curve

Curve = Mapping[tuple[str, int], set[Any]]
# How a warning is told by which a training says that it cannot be resumed exactly.
_EXACT = re.compile(r"\bexact(ly)?\b", re.IGNORECASE)
# What a rank reports of its end, where it does, that must be as in the undisturbed run.
_JUDGED = ("step", "weights", "kept", "optimizers", "schedulers", "callbacks")


def newest_whole(checkpoints: Path) -> str | None:
    """The name of the checkpoint that the next attempt has to go on from; None if there is none."""
    whole = []
    for path in checkpoints.glob("*.manifest.json"):
        manifest = _sound_manifest(path)
        files = manifest.get("files", {}).items()
        if files and all(_is_as_written(checkpoints / name, each["size"], each["crc32"]) for name, each in files):
            whole.append((manifest["attempt"], manifest["step"], manifest["name"]))
    return max(whole)[2] if whole else None


def curve_differences(found: Curve, expected: Curve) -> list[str]:
    """How a logged curve is another than it should be: values by name and step."""
    missing, strange = expected.keys() - found.keys(), found.keys() - expected.keys()
    other = [key for key in expected.keys() & found.keys() if found[key] != expected[key]]
    kinds = {"missing": missing, "not in the undisturbed run": strange, "other values": other}
    return [f"{len(keys)} points {kind}, such as {_first(keys)}" for kind, keys in kinds.items() if keys]


def warning_differences(warned: list[str], impossible: bool) -> list[str]:
    """What can be resumed exactly says nothing, what cannot says so once, before the first batch."""
    said = [each for each in warned if _EXACT.search(each)]
    return (
        [] if len(said) == impossible else [f"{len(said)} warnings of no exact resume, not {int(impossible)}: {said}"]
    )


def _batches_read(file: Path) -> Curve:
    """What the steps of a rank have read, by epoch and number in it: a fingerprint, more where they were not equal."""
    found: dict[tuple[str, int], set[Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        epoch, batch, fingerprint = json.loads(line)
        found.setdefault((f"epoch {epoch:03}", batch), set()).add(fingerprint)
    return found


def training_differences(
    output: Path, reference: Path, found: Mapping[int, Any], expected: Mapping[int, Any]
) -> list[str]:
    """How a training that has ended is another: what its ranks read, what was logged, and what came out."""
    differences = []
    for rank in expected:
        read, right = (_batches_read(folder / f"batches-{rank}.jsonl") for folder in (output, reference))
        differences += [f"batches of rank {rank}: {each}" for each in curve_differences(read, right)]
    curves = (curve(folder / "curve.jsonl") for folder in (output, reference))
    return [*differences, *curve_differences(*curves), *result_differences(found, expected)]


def points_logged(curve: Path) -> Counter[tuple[str, int]]:
    """How often each point was logged; Lightning logs `epoch` with whatever else it logs."""
    return Counter((name, step) for name, step, _ in map(json.loads, curve.read_text().splitlines()))


def mlflow_differences(
    histories: Mapping[str, list[tuple[int, float]]], expected: Curve, often: Counter[tuple[str, int]]
) -> list[str]:
    """The same of a run's metrics in MLflow, where no point is there more often than it was logged undisturbed."""
    points = Counter((name, step) for name, history in histories.items() for step, _ in history)
    repeated = [key for key, count in points.items() if count > often[key]]
    found: dict[tuple[str, int], set[float]] = {}
    for name, history in histories.items():
        for step, value in history:
            found.setdefault((name, step), set()).add(value)
    differences = curve_differences(found, expected)
    return [*differences, *([f"{len(repeated)} points logged again, such as {min(repeated)}"] if repeated else [])]


def result_differences(found: Mapping[int, Any], expected: Mapping[int, Any]) -> list[str]:
    """How what came out is another: weights, steps and all else that each rank reports, bit for bit."""
    if found.keys() != expected.keys():
        return [f"ranks {sorted(found)} have finished, not {sorted(expected)}"]
    return [
        difference
        for rank in expected
        for key in _JUDGED
        if key in expected[rank]
        for difference in _value_differences(f"{key} of rank {rank}", found[rank][key], expected[rank][key])
    ]


def _value_differences(what: str, found: Any, expected: Any) -> list[str]:
    """One line at most: by names, where there are any."""
    if not isinstance(expected, dict):
        return [] if found == expected else [what]
    other = [name for name in [*expected, *found] if found.get(name, "none") != expected.get(name, "none")]
    if not other:
        return []
    name = other[0]
    such_as = f"{name} ({found.get(name, 'none')}, not {expected.get(name, 'none')})"
    return [f"{what}: {len(set(other))} of {len(expected)} differ, such as {such_as}"]


def _first(points: Iterable[tuple[str, int]]) -> tuple[str, int]:
    """The earliest; where steps begin anew with each epoch, of the first epoch."""
    return min(points, key=lambda point: (point[0] if point[0].startswith("epoch ") else "", point[1], point[0]))


def _sound_manifest(path: Path) -> dict[str, Any]:
    """What a manifest says; nothing if it is not as it was written, or is that of another checkpoint."""
    try:
        content = json.loads(path.read_text())
    except ValueError:
        return {}
    if not isinstance(content, dict):
        return {}
    stored = content.pop("crc32", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    sound = stored == zlib.crc32(text) and path.name == f"{content['name']}.manifest.json"
    return content if sound else {}


def _is_as_written(path: Path, size: int, crc32: int) -> bool:
    if not path.is_file():
        return False
    content = path.read_bytes()
    return len(content) == size and zlib.crc32(content) == crc32
