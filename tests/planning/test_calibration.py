"""Fits to runs whose truth is known: the planner's own with other numbers and noise, and Azure's clusters of 2018."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from azureml_strategy.planning import Distribution, PlanError, named_network, predict
from azureml_strategy.planning.calibration import Calibration, Observed, calibrate
from azureml_strategy.planning.calibration_file import read_calibration, write_calibration
from azureml_strategy.planning.fitted import Parameters, default_parameters

_PUBLISHED = Path(__file__).parents[2] / "benchmarks/published/azure_resnet50_2018.csv"
_SIZE = "Standard_ND96asr_v4"


def other_world() -> Parameters:
    """Numbers as another machine could have them: slower memory, links that disturb more, and unequal ranks."""
    known = default_parameters()
    tiers = {
        name: replace(tier, latency_s=2 * tier.latency_s, slowdown=1.8 * tier.slowdown)
        for name, tier in known.tiers.items()
    }
    slower = replace(known.efficiency, memory=0.8 * known.efficiency.memory, product=0.4)
    return replace(known, efficiency=slower, tiers=tiers, skew=0.015)


def arguments(nodes: int, gpus: int = 8, **others: Any) -> dict[str, Any]:
    return {
        "network": "gpt_350m",
        "batch_size": 8,
        "vm_size": _SIZE,
        "nodes": nodes,
        "gpus_per_node": gpus,
        **others,
    }


def truth(given: Mapping[str, Any]) -> float:
    return predict(**given, inside_gb=120.0, across_gb=45.0, parameters=other_world()).samples_per_second


def observed(*cases: Mapping[str, Any], noise: float = 0.005) -> list[Observed]:
    random = np.random.default_rng(7)
    return [
        Observed(f"run {place}", given, truth(given) * math.exp(random.normal(0, noise)))
        for place, given in enumerate(cases)
    ]


def error(given: Mapping[str, Any], calibration: Calibration | None) -> float:
    parameters = calibration.parameters if calibration else None
    return abs(predict(**given, parameters=parameters).samples_per_second / truth(given) - 1)


def told(calibration: Calibration) -> set[str]:
    return {each.what for each in calibration.numbers if each.told}


def test_runs_of_few_nodes_tell_the_rates_of_many() -> None:
    small = [arguments(1, 1), arguments(1), arguments(2), arguments(2, batch_size=4), arguments(4)]
    large = [arguments(8), arguments(16), arguments(32), arguments(8, batch_size=16)]
    found = calibrate(observed(*small))
    assert max(found.errors("after")) < 0.02
    for given in large:
        assert error(given, found) < 0.05
        assert error(given, found) < error(given, None) / 3
        range_ = predict(**given, parameters=found.parameters)
        assert range_.low < truth(given) < range_.high
    assert {"time of a step's kernels", "bandwidth between nodes"} <= told(found)
    across = next(each for each in found.numbers if each.what == "bandwidth between nodes")
    assert across.after == pytest.approx(45, rel=0.35)
    assert "predicted from the others" not in "".join(found.lines())
    assert found.errors("left_out")


def test_each_run_is_predicted_from_the_others_as_if_it_had_not_been_named() -> None:
    runs = observed(arguments(1, 1), arguments(1), arguments(2), arguments(2, batch_size=4), arguments(4), noise=0.02)
    found = calibrate(runs)
    assert [fit.left_out is None for fit in found.fits] == [False, True, False, False, False]
    for place, fit in enumerate(found.fits):
        if fit.left_out is not None:
            others = calibrate([*runs[:place], *runs[place + 1 :]]).parameters
            assert fit.left_out == pytest.approx(
                predict(**runs[place].arguments, parameters=others).samples_per_second, rel=0.01
            )


def test_one_gpu_tells_computation_alone() -> None:
    found = calibrate(observed(arguments(1, 1)))
    assert told(found) == {"time of a step's kernels"}
    assert len(found.numbers) == 1
    assert error(arguments(1, 1), found) < 0.01
    (key,) = found.parameters.corrections
    assert key == ("A100", "transformer", "bf16-mixed", False)
    assert not found.parameters.adjustments


def test_one_run_of_several_nodes_tells_the_bandwidth_alone() -> None:
    found = calibrate(observed(arguments(1, 1), arguments(4)))
    assert told(found) == {"time of a step's kernels", "bandwidth between nodes"}
    for each in found.numbers:
        if not each.told:
            assert each.after == each.before, each.text()
    (adjusted,) = found.parameters.adjustments.values()
    assert (adjusted.latency, adjusted.slowdown, adjusted.skew) == (1, 1, 1)
    assert "slowdown while communicating" in found.lines()[-1]


def test_what_no_run_was_of_is_predicted_as_before() -> None:
    found = calibrate(observed(arguments(1, 1), arguments(2)))
    elsewhere = [
        arguments(2) | {"vm_size": "Standard_ND96isr_H100_v5"},
        arguments(1, 1, network="resnet50"),
        arguments(2, precision="32-true", interconnect="ethernet"),
    ]
    for given in elsewhere:
        assert predict(**given, parameters=found.parameters) == predict(**given)
    touched = predict(**arguments(2), parameters=found.parameters)
    assert touched.basis == found.parameters.name != predict(**arguments(2)).basis


def test_eager_runs_count_for_compiled_candidates_until_compiled_ones_are_there() -> None:
    """Else a GPU that is slower than expected would seem faster in the mode in which nobody has tried it."""
    eager, compiled = arguments(1, 1), arguments(1, 1, compiled=True)
    runs = [Observed("eager", eager, 0.7 * predict(**eager).samples_per_second)]
    found = predict(**compiled, parameters=calibrate(runs).parameters)
    assert found.samples_per_second == pytest.approx(0.7 * predict(**compiled).samples_per_second, rel=0.05)
    assert found.basis.endswith(", which were eager")
    assert found.high / found.samples_per_second >= predict(**compiled).high / predict(**compiled).samples_per_second
    runs.append(Observed("compiled", compiled, 0.9 * predict(**compiled).samples_per_second))
    both = predict(**compiled, parameters=calibrate(runs).parameters)
    assert both.samples_per_second == pytest.approx(0.9 * predict(**compiled).samples_per_second, rel=0.02)
    assert both.high / both.samples_per_second < 1.1


def test_runs_that_confirm_the_planner_change_nothing() -> None:
    cases = [arguments(1, 1), arguments(1), arguments(2), arguments(4)]
    same = [Observed(str(nr), given, predict(**given).samples_per_second) for nr, given in enumerate(cases)]
    found = calibrate(same)
    assert max(found.errors("after")) < 1e-3
    for number in found.numbers:
        assert number.after == pytest.approx(number.before, rel=0.02), number.text()


def test_the_range_follows_from_the_errors() -> None:
    cases = [arguments(1, 1), arguments(1, 1, batch_size=16), arguments(1, 1, batch_size=32)]

    def range_of(*errors: float) -> float:
        pairs = zip(cases, errors, strict=True)
        runs = [Observed(f"{error}", given, truth(given) * (1 + error)) for given, error in pairs]
        rates = predict(**cases[0], parameters=calibrate(runs).parameters)
        return rates.high / rates.samples_per_second - 1

    exact, scattered = range_of(0.0, 0.0, 0.0), range_of(0.0, 0.3, -0.25)
    assert exact < 0.05 < 0.1 < scattered
    assert exact < predict(**cases[0]).high / predict(**cases[0]).samples_per_second - 1


def test_two_runs_that_contradict_one_another_widen_the_range() -> None:
    runs = [Observed(str(e), arguments(1, 1), truth(arguments(1, 1)) * e) for e in (0.8, 1.2)]
    found = calibrate(runs)
    assert not found.errors("left_out")
    (correction,) = found.parameters.corrections.values()
    assert correction.error > 0.15


def test_sharded_runs_and_a_pipeline_are_calibrated_together() -> None:
    sharded = Distribution(strategy="model_parallel")
    pipeline = Distribution(strategy="pipeline", num_stages=4, micro_batches=8)
    cases = [arguments(1, 1), arguments(2, strategy=sharded), arguments(2, strategy=pipeline), arguments(4)]
    found = calibrate(observed(*cases))
    held_out = arguments(8, strategy=sharded)
    assert max(found.errors("after")) < 0.05
    assert error(held_out, found) < 0.05 < error(held_out, None)


def published() -> list[dict[str, str]]:
    lines = [line for line in _PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    return [row for row in csv.DictReader(lines) if row["network"] != "none"]


def of_row(row: Mapping[str, str]) -> dict[str, Any]:
    return {
        "network": "resnet50",
        "batch_size": 64,
        "vm_size": row["vm_size"],
        "nodes": int(row["gpus"]) // 4,
        "precision": "32-true",
        "optimizer": "sgd",
        "interconnect": row["network"],
    }


def test_4_and_8_gpus_of_2018_tell_the_rates_of_16() -> None:
    """Without the links that are fitted to the same cluster, which the planner has."""
    unfitted = replace(default_parameters(), links={})
    small = [row for row in published() if row["gpus"] != "16"]
    found = calibrate(
        [Observed(" ".join(row.values()), of_row(row), float(row["images_per_second"])) for row in small], unfitted
    )
    before, after, naive = [], [], []
    for row in (row for row in published() if row["gpus"] == "16"):
        rates, measured = predict(**of_row(row), parameters=found.parameters), float(row["images_per_second"])
        after.append(abs(rates.samples_per_second / measured - 1))
        naive.append(abs(rates.naive / measured - 1))
        before.append(abs(predict(**of_row(row), parameters=unfitted).samples_per_second / measured - 1))
        assert rates.low < measured < rates.high
    assert len(after) == 8
    assert median(after) < 0.03
    assert max(after) < 0.07
    assert median(before) > 0.15
    assert median(naive) > 0.1


def test_a_calibration_is_written_and_read() -> None:
    found = calibrate(observed(arguments(1, 1), arguments(1), arguments(2), arguments(4)))
    again = read_calibration(write_calibration(found).decode(), "ours.json")
    assert again.parameters == found.parameters
    assert (again.fits, again.numbers, again.lines()) == (found.fits, found.numbers, found.lines())


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        "null",
        '{"calibration": 1, "corrections": 3, "adjustments": []}',
        pytest.param("[" * 100_000, id="deep"),
    ],
)
def test_a_file_that_is_no_calibration_is_said_to_be_none(content: str) -> None:
    with pytest.raises(PlanError, match=r"ours\.json is no calibration"):
        read_calibration(content, "ours.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("factor", "-1.2"),
        ("factor", "1e999"),
        ("factor", "1e300"),
        ("factor", "null"),
        ("error", "NaN"),
        ("across", "0"),
        ("skew", '"much"'),
        ("gpu", "[]"),
        ("measured", '"fast"'),
        ("measured", "0"),
        ("place", "[]"),
        ("before", "null"),
        ("told", '1, "of": 2'),
        ("told", "1"),
        ("at_bound", '"no"'),
        ("error", "9000"),
        ("error", "true"),
        ("inside_error", "1.5"),
        ("slowdown", "9000"),
        ("gpu", '"A1000"'),
        ("family", '"recurrent"'),
        ("precision", '"bf17"'),
        ("compiled", '"false"'),
        ("compiled", "0"),
        ("source", "3"),
        ("vm_size", '"banana"'),
        ("vm_size", '"Standard_ND96asr_v4"'),
        ("network", '"token ring"'),
        ("calibration", '{"a": "b"}'),
        ("version", "1"),
        ("parameters", "1.5"),
        ("smallest_batch", "-1"),
        ("measured", "true"),
    ],
)
def test_a_file_with_a_value_that_makes_no_sense_is_no_calibration(name: str, value: str) -> None:
    content = write_calibration(calibrate(observed(arguments(1, 1), arguments(2)))).decode()
    assert read_calibration(content, "ours.json")
    changed = re.sub(rf'"{name}": (?:"[^"]*"|[^,\n]+)', lambda _: f'"{name}": {value}', content, count=1)
    with pytest.raises(PlanError, match=r"ours\.json is no calibration"):
        read_calibration(changed, "ours.json")


def test_an_empty_file_and_names_that_are_none_are_no_calibration() -> None:
    values = json.loads(write_calibration(calibrate(observed(arguments(1, 1)))))
    for part in ("corrections", "fits", "numbers"):
        with pytest.raises(PlanError, match=r"ours\.json is no calibration"):
            read_calibration(json.dumps(values | {part: []}), "ours.json")
    values["fits"][0]["name"] = ["run 0"]
    with pytest.raises(PlanError, match=r"name is \['run 0'\]"):
        read_calibration(json.dumps(values), "ours.json")


def test_a_calibration_of_another_version_says_so() -> None:
    values = json.loads(write_calibration(calibrate(observed(arguments(1, 1)))))
    assert values["version"] == version("azureml-strategy")
    again = read_calibration(json.dumps(values | {"version": "0.0.7"}), "ours.json")
    assert again.lines()[0].startswith("This calibration was made by azureml-strategy 0.0.7, and this is ")
    assert again.lines()[1:] == calibrate(observed(arguments(1, 1))).lines()


def spread(given: Mapping[str, Any], calibration: Calibration | None) -> float:
    rates = predict(**given, parameters=calibration.parameters if calibration else None)
    return rates.high / rates.samples_per_second - 1


def test_repeats_of_one_setting_say_little_of_other_settings() -> None:
    one = {"network": "resnet50", "batch_size": 256, "gpu": "A100", "optimizer": "sgd"}
    rates = predict(**one).samples_per_second * np.random.default_rng(1).normal(0.9, 0.01, size=10)
    runs = [Observed(f"run {place}", one, rate) for place, rate in enumerate(rates)]
    found, two = calibrate(runs), calibrate(runs[:3])
    assert spread(one, found) == pytest.approx(spread(one, two), abs=0.01)
    assert 0.04 < spread(one, found) < 0.07
    for other in (one | {"batch_size": 8}, one | {"batch_size": 257}, one | {"network": "resnet152"}):
        assert spread(one, found) < 0.07 < spread(other, found) <= spread(other, None)
    compiled = one | {"compiled": True}
    assert spread(compiled, found) < spread(compiled | {"batch_size": 8}, found)


def test_a_network_is_known_again_by_what_it_computes() -> None:
    one = arguments(1, 1, network=named_network("gpt_350m"))
    found = calibrate(observed(one, one | {"batch_size": 16}))
    renamed = one | {"network": replace(named_network("gpt_350m"), name="ours"), "batch_size": 12}
    assert spread(renamed, found) == spread(one, found) < spread(one | {"network": "gpt_1b"}, found)
    again = read_calibration(write_calibration(found).decode(), "ours.json")
    assert spread(renamed, again) == spread(renamed, found)


def test_runs_inside_one_node_say_nothing_of_what_crosses_nodes() -> None:
    cases = [arguments(1, gpus, batch_size=batch) for gpus, batch in ((2, 8), (4, 8), (8, 8), (8, 4), (8, 16))]
    found = calibrate(observed(*cases))
    (adjusted,) = found.parameters.adjustments.values()
    assert adjusted.error is None
    assert adjusted.inside_error is not None
    assert "bandwidth between nodes" in found.lines()[-1].partition("Not told")[2]
    # Small batches, so that communication is most of a step: what is known of it without runs bounds the range.
    wide = predict(**arguments(16, batch_size=4), parameters=found.parameters)
    share = wide.communication_s / wide.step_s
    assert share > 0.05
    assert wide.high / wide.samples_per_second - 1 >= share * default_parameters().errors["infiniband"]
    assert spread(arguments(1), found) < spread(arguments(1), None)


def test_the_error_between_nodes_is_that_of_runs_on_several() -> None:
    inside = [arguments(1, gpus) for gpus in (2, 4, 8)]
    across = [arguments(2), arguments(4), arguments(8), arguments(4, batch_size=16)]
    together = calibrate(observed(*inside, *across)).parameters.adjustments
    ((error, inside_error),) = ((each.error, each.inside_error) for each in together.values())
    assert error is not None
    assert inside_error is not None
    assert error != inside_error


def test_a_number_that_ended_at_its_bound_is_named() -> None:
    one = arguments(1, 1)
    rate = predict(**one).samples_per_second
    stuck = calibrate([Observed("stuck", one, rate / 3000)])
    (line,) = [each for each in stuck.lines() if each.startswith("Ended at the bound")]
    assert "time of a step's kernels (A100, transformer, bf16-mixed, eager)" in line
    assert not any(each.at_bound for each in calibrate([Observed("slow", one, rate / 3)]).numbers)
    (correction,) = stuck.parameters.corrections.values()
    assert correction.error == 1  # of the fit, which is larger than what is assumed


@pytest.mark.parametrize("rate", [0.0, -3.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(PlanError, match="one measured"):
        calibrate([Observed("one", arguments(1, 1), rate)])


def test_no_run_is_refused() -> None:
    with pytest.raises(PlanError, match="no run to calibrate on"):
        calibrate([])


def test_given_bandwidths_are_not_fitted() -> None:
    given = {"network": "gpt_350m", "batch_size": 8, "gpu": "A100", "nodes": 2, "across_gb": 20.0}
    found = calibrate([Observed("one", given, 0.8 * predict(**given).samples_per_second)])
    assert not found.parameters.adjustments
    assert found.errors("after")[0] < 0.02


def test_the_same_run_again_frees_no_further_number() -> None:
    one, again = arguments(1, 1), [arguments(4) for _ in range(4)]
    found = calibrate(observed(one, *again))
    assert {each.what for each in found.numbers if each.before != each.after} == {
        "time of a step's kernels",
        "bandwidth between nodes",
    }
