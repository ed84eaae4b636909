"""Packed images reach the training in one order, wherever they lie, whoever reads them, and whatever happens."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.data.azurite import Azurite
from tests.data.conftest import azurite, fault_proxy
from tests.data.fault_proxy import FaultProxy
from tests.multiprocess.conftest import Job, RunJob

from azureml_strategy.cli import main

__all__ = ["azurite", "fault_proxy"]  # fixtures
Samples = dict[str, list[tuple[str, int]]]
STEPS = 2 * (45 // 8)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """45 images for training and 10 for validation, each with pixels of its own, in shards of some ten."""
    folder = tmp_path_factory.mktemp("sharded")
    random = np.random.default_rng(2)
    for part, count in (("train", 45), ("val", 10)):
        for number in range(count):
            image = folder / "images" / part / f"class{number % 5}" / f"{number}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (12, 16, 3)).astype(np.uint8)).save(image)
    assert main(["data", "pack", str(folder / "images"), str(folder / "packed"), "--shard-size", "12KB"]) == 0
    return folder / "packed"


def train(
    run_job: RunJob, output: Path, ranks: int, variables: dict[str, str] | None = None, attempt: int = 0, **options: Any
) -> Job:
    return run_job("sharded.py", output, json.dumps({"attempt": attempt, **options}), nodes=ranks, extra=variables)


def samples(output: Path, ranks_of_attempt: list[int]) -> Samples:
    """The samples of each step over all ranks, in the order of the epoch; a later attempt replaces what it repeats."""
    found: Samples = {}
    for attempt, ranks in enumerate(ranks_of_attempt):
        parts: dict[str, dict[int, list[tuple[str, int]]]] = defaultdict(dict)
        for rank in range(ranks):
            for line in (output / f"samples.{attempt}.{rank}.jsonl").read_text().splitlines():
                place, noted = json.loads(line)
                parts[place][rank] = [(digest, label) for digest, label in noted]
        for place, of_rank in parts.items():
            shares = [of_rank.get(rank, []) for rank in range(ranks)]
            longest = max(map(len, shares))
            found[place] = [share[row] for row in range(longest) for share in shares if row < len(share)]
    return found


CACHE = {"cache": "cache", "cache_limit": "1MB"}
DEFAULT = [
    (1, "folder", {"num_workers": 0}),
    (2, "blob with faults", {"num_workers": 2, **CACHE}),  # cold
    (4, "blob", {"num_workers": 0, **CACHE}),  # warm
    (1, "folder", {"num_workers": 2, **CACHE, "cache_limit": "20KB"}),
]
EVERY = [
    (ranks, place, {"num_workers": workers, **cache})
    for ranks, workers, place, cache in product((1, 2, 4), (0, 2, 4), ("folder", "blob with faults"), ({}, CACHE))
] + [(2, "blob", {"num_workers": 4, **CACHE})]  # nothing fails on the way to a warm cache


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(DEFAULT, id="some"),
        pytest.param(EVERY, id="every", marks=[pytest.mark.exhaustive, pytest.mark.timeout(3000)]),
    ],
)
def test_one_order(
    run_job: RunJob,
    tmp_path: Path,
    packed: Path,
    azurite: Azurite,
    fault_proxy: FaultProxy,
    cases: list[tuple[int, str, dict[str, Any]]],
) -> None:
    """Mount or Blob Storage with faults, cache off, cold, warm and too small, on any ranks and workers."""
    blob = azurite.upload(packed)
    seen: list[Samples] = []
    for number, (ranks, place, options) in enumerate(cases):
        through = azurite
        if place == "blob with faults":
            through = fault_proxy
            fault_proxy.fail(503, "ServerBusy", pattern="tar", times=3, retry_after="1")
            fault_proxy.drop(100, pattern="tar", times=3)
            fault_proxy.resize(-1, pattern="tar", times=2)
            fault_proxy.fail(429, pattern="tar", times=2)
        root = str(packed) if place == "folder" else blob
        caching = {"cache": str(tmp_path / options["cache"])} if "cache" in options else {}
        job = train(run_job, tmp_path / str(number), ranks, through.environment, **{**options, **caching, "root": root})
        assert job.exit_code == 0, job.output
        seen.append(samples(tmp_path / str(number), [ranks]))
    steps = [{place: noted for place, noted in each.items() if place.startswith("train")} for each in seen]
    assert len(steps[0]) == STEPS
    assert len({digest for noted in steps[0].values() for digest, _ in noted}) == STEPS * 8, "each crop is another one"
    assert all(each == steps[0] for each in steps[1:])
    validated = [
        sorted(s for place, noted in each.items() if place.startswith("val 0") for s in noted if s[1] >= 0)
        for each in seen
    ]
    assert len(validated[0]) == 10
    assert all(each == validated[0] for each in validated[1:])


@pytest.mark.parametrize("last", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_killed_anywhere_it_goes_on_with_the_next_sample(
    run_job: RunJob, tmp_path: Path, packed: Path, azurite: Azurite, last: int
) -> None:
    blob = azurite.upload(packed)
    whole = train(run_job, tmp_path / "whole", 1, root=str(packed), num_workers=0, shuffle="window", window=2)
    assert whole.exit_code == 0, whole.output
    options = {"root": blob, "shuffle": "window", "window": 2, "cache": str(tmp_path / "cache"), "cache_limit": "30KB"}
    attempts = [(2, 3, 2), (4, 7, 0), (last, None, 2)]
    for attempt, (ranks, die_at, workers) in enumerate(attempts):
        more = {"num_workers": workers, "attempt": attempt} | ({} if die_at is None else {"die_at": die_at})
        job = train(run_job, tmp_path / "killed", ranks, azurite.environment, **options, **more)
        assert (job.exit_code == 0) == (die_at is None), job.output
    ours = samples(tmp_path / "killed", [ranks for ranks, _, _ in attempts])
    theirs = samples(tmp_path / "whole", [1])
    assert {k: v for k, v in ours.items() if k.startswith("train")} == {
        k: v for k, v in theirs.items() if k.startswith("train")
    }
