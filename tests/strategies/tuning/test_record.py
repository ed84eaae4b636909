"""Files of tuned settings: written, read, and refused where they do not fit."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.tuning.record import (
    Conditions,
    Tuning,
    describe_batch,
    read_tuning,
    refuse_other_conditions,
    tuning_of,
    write_tuning,
)
from azureml_strategy.strategies.tuning.search import COMPRESSIONS, Request, Settings, Trials, sizes_first_bucket
from azureml_strategy.strategies.tuning.trials import RefusalError
from azureml_strategy.strategies.tuning.tuner import TuningOrder, refuse_straggler

MODULE = torch.nn.Linear(3, 2)
HERE = replace(Conditions.of(MODULE, 4, 2, "gloo", ["H100"] * 4, "bf16-mixed"), batch="float32 [8, 3]")
OF_OLD_VERSIONS = ("devices", "precision", "batch")
SETTINGS = st.builds(
    Settings,
    st.none() | st.integers(1, 200),
    st.none() | st.integers(1, 10),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, *COMPRESSIONS]),
    st.integers(1, 4),
)
SECONDS = st.floats(1e-6, 1e3)


def made(default: Settings, pick: Settings, seconds: list[float]) -> Tuning:
    trials = Trials({default: seconds, pick: seconds[::-1]}, [(each, each / 2) for each in seconds])
    return tuning_of(HERE, Request(default, ("bf16",), True), pick, "it is", trials, [0.1, 0.2], 44)


@given(SETTINGS, SETTINGS, st.lists(SECONDS, min_size=1, max_size=9))
def test_a_file_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, default: Settings, pick: Settings, seconds: list[float]
) -> None:
    path = tmp_path_factory.mktemp("tuned") / "deep" / "tuned.json"
    tuning = made(default, pick, seconds)
    write_tuning(path, tuning)
    found = read_tuning(path)
    assert found == tuning
    assert found.report() == tuning.report()
    assert [each.name for each in path.parent.iterdir()] == ["tuned.json"]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", "{}", '{"format": 2}', '{"format": 1, "pick": {}}', "\x00"],
)
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tuned.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"is no file of `azureml-strategy tune`"):
        read_tuning(path)


def test_a_file_with_settings_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    content = json.loads(made(Settings(), Settings(25), [1.0]).to_text())
    content["pick"]["quantum"] = True
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigurationError, match="quantum"):
        read_tuning(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no such file.*azureml-strategy tune RECIPE --output"):
        read_tuning(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Conditions.of(torch.nn.Linear(3, 3), 4, 2, "gloo"), "model Linear"),
        (Conditions.of(MODULE, 8, 2, "gloo"), "world_size 4, and here 8"),
        (Conditions.of(MODULE, 4, 4, "gloo"), "num_nodes 2, and here 4"),
        (Conditions.of(MODULE, 4, 2, "nccl"), "backend gloo, and here nccl"),
        (replace(HERE, torch="9.9"), f"torch {torch.__version__}, and here 9.9"),
        (
            Conditions.of(MODULE, 4, 2, "gloo", ["V100", "H100", "V100", "H100"]),
            "devices 4 x H100, and here 2 x H100, 2 x V100",
        ),
        (replace(HERE, precision="32-true"), "precision bf16-mixed, and here 32-true"),
        (replace(HERE, batch="float32 [16, 3]"), "batch float32 [8, 3], and here float32 [16, 3]"),
    ],
)
def test_other_conditions_are_refused_by_name(other: Conditions, words: str) -> None:
    tuning = made(Settings(), Settings(25), [1.0])
    refuse_other_conditions(Path("t.json"), tuning, HERE)
    with pytest.raises(ConfigurationError) as refused:
        refuse_other_conditions(Path("t.json"), tuning, other)
    assert words in str(refused.value)
    assert "Measure anew" in str(refused.value)


def test_a_file_of_an_older_version_is_taken_with_a_warning_that_names_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    content = json.loads(made(Settings(), Settings(25), [1.0]).to_text())
    for name in OF_OLD_VERSIONS:
        del content["conditions"][name]
    path.write_text(json.dumps(content))
    order = TuningOrder(False, Request(Settings()), path)
    with pytest.warns(UserWarning, match="does not say its devices and precision and batch, as an older version"):
        found = order.earlier(Trainer(accelerator="cpu", logger=False), HERE)
    assert found is not None
    assert found.pick == Settings(25)
    assert order.fits_batch(found, "float32 [99]")
    with pytest.raises(ConfigurationError, match="world_size 4, and here 8"):
        refuse_other_conditions(path, found, replace(HERE, world_size=8))


@pytest.mark.parametrize("tune", [False, True])
def test_settings_for_another_batch_are_refused_or_measured_anew(tune: bool) -> None:
    tuning = made(Settings(), Settings(25), [1.0])
    order = TuningOrder(tune, Request(Settings()), None if tune else Path("t.json"))
    assert order.fits_batch(tuning, HERE.batch)
    if tune:
        assert order.fits_batch(tuning, "float32 [8, 77]"), "longer sequences, in a restart of the run"
    assert order.fits_batch(tuning, None), "a batch of an unknown kind"
    if tune:
        assert not order.fits_batch(tuning, "float32 [99]")
    else:
        with pytest.raises(ConfigurationError, match=r"'t.json' was measured for batch float32 \[8, 3\], and here"):
            order.fits_batch(tuning, "float32 [99]")


def test_a_batch_in_words() -> None:
    @dataclass(frozen=True)
    class Frozen:
        image: torch.Tensor

    @dataclass
    class Pair:
        image: torch.Tensor
        label: torch.Tensor

    images, labels = torch.zeros(8, 3, 32, 32, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64)
    for batch in ((images, labels), {"x": images, "y": [labels, "names"]}, Pair(images, labels)):
        assert describe_batch(((batch, 7), {})) == "uint8 [8, 3, 32, 32], int64 [8]"
    assert describe_batch(((object(), 7), {})) is None
    assert describe_batch(((Frozen(images), 7), {})) == "uint8 [8, 3, 32, 32]"


def test_the_report_names_costs_and_the_pick() -> None:
    default, pick = Settings(), Settings(25, gradient_compression="bf16")
    tuning = made(default, pick, [2.0, 2.2, 2.4])
    lines = tuning.report().splitlines()
    assert any(line.strip().startswith("buckets of 25 MiB, bf16") and "8 bits of mantissa" in line for line in lines)
    assert any(line.strip().startswith("torch's buckets") and "none: the same sums" in line for line in lines)
    assert lines[-1] == "Picked: buckets of 25 MiB, bf16; it is."
    assert tuning.metrics() == {
        "tune/steps": 44.0,
        "tune/speedup": 2.0,
        "tune/default_step_s": 2.2,
        "tune/pick_step_s": 2.2,
        "tune/compute_step_s": 0.2,
    }


def test_arguments_of_torch() -> None:
    assert Settings(25).arguments()["bucket_cap_mb"] == 25
    if sizes_first_bucket():
        assert Settings(25, 1).arguments()["bucket_cap_mb_list"] == [1, 25]
        assert Settings(None, 1).arguments()["bucket_cap_mb_list"] == [1, 25]
    else:
        with pytest.raises(ConfigurationError, match="bucket_cap_mb_list"):
            Settings(25, 1).arguments()


@pytest.mark.parametrize(
    ("alone", "named"), [([1.0, 1.9], None), ([1.0, 2.1], 1), ([3.0, 1.0, 1.1, 0.9], 0), ([1.0, 1.1, 1.2], None)]
)
def test_a_straggler_is_named(alone: list[float], named: int | None) -> None:
    if named is None:
        refuse_straggler(alone)
        return
    with pytest.raises(RefusalError, match=f"rank {named} computes for"):
        refuse_straggler(alone)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tune": True, "ddp_comm_hook": lambda state, bucket: None}, "so does ddp_comm_hook"),
        ({"tuned": "t.json", "ddp_comm_hook": lambda state, bucket: None}, "so does ddp_comm_hook"),
        ({"tune": True, "bucket_cap_mb_list": [1, 25]}, "Leave bucket_cap_mb_list out"),
        ({"tune": True, "tune_lossy": "int4"}, "'int4', which is no compression"),
        ({"tune": True, "tune_lossy": ["bf16", "x"]}, "'x', which is no compression"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AzureMLDDPStrategy(**arguments)
