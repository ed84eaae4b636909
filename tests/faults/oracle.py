"""Judges what a disturbed run has left, by what a user sees of it: folders, curves, MLflow. It uses nothing of ours."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Curve = Mapping[tuple[str, int], set[float]]


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
    return [f"{len(keys)} points {kind}, such as {min(keys)}" for kind, keys in kinds.items() if keys]


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
    """How the model that came out is another: weights and steps of each rank, bit for bit."""
    if found.keys() != expected.keys():
        return [f"ranks {sorted(found)} have finished, not {sorted(expected)}"]
    keys = ("step", "weights")
    return [f"{key} of rank {rank}" for rank in expected for key in keys if found[rank][key] != expected[rank][key]]


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
