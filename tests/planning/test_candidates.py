"""Which size, number of nodes and strategy is the best."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import open_dict

from azureml_strategy.cluster.job import Price
from azureml_strategy.jobs.recipe import plan_recipe
from azureml_strategy.network.vm_sizes import VMSize, lookup_vm_size
from azureml_strategy.planning import PlanError
from azureml_strategy.planning.candidates import Plan, Wanted, frontier, make_plan
from azureml_strategy.planning.commands import submit_command
from azureml_strategy.planning.page import draw_plan, print_plan
from azureml_strategy.planning.plan_json import as_json
from azureml_strategy.planning.steps import STRATEGIES
from azureml_strategy.planning.workload import Workload, read_workload
from azureml_strategy.training.checks import check_config, compose_recipe
from azureml_strategy.training.recipes import find_recipe

_PRICES = {"Standard_ND96isr_H100_v5": 98.0, "Standard_NC24ads_A100_v4": 3.7}
_SIZES = tuple(map(lookup_vm_size, _PRICES))


@pytest.fixture(scope="module")
def resnet() -> Workload:
    return read_workload("resnet50_imagenet", [])


def _price(size: VMSize) -> Price | None:
    return Price(_PRICES.get(size.name, 1.0), "EUR", "test")


def _plan(workload: Workload, **wanted: Any) -> Plan:
    return make_plan(workload, Wanted(**{"sizes": _SIZES, "nodes": (1, 2, 8), **wanted}), _price)


def test_the_cheapest_is_first_and_cost_is_nodes_times_hours_times_price(resnet: Workload) -> None:
    plan = _plan(resnet)
    costs = [each.cost for each in plan.candidates]
    assert costs == sorted(costs, key=lambda cost: cost or 0)
    best = plan.best
    assert best is not None
    assert (best.size.name, best.nodes) == ("Standard_NC24ads_A100_v4", 1)
    seconds = 90 * 1_281_167 / best.prediction.samples_per_second
    assert best.cost == pytest.approx(seconds / 3600 * 3.7)


def test_ranked_by_time_deadline_and_budget(resnet: Workload) -> None:
    fastest = _plan(resnet, rank="time").best
    assert fastest is not None
    assert (fastest.size.name, fastest.nodes) == ("Standard_ND96isr_H100_v5", 8)
    in_time = _plan(resnet, deadline=1.0).best
    assert in_time is not None
    assert (in_time.hours or 9) <= 1.0
    assert in_time.size.name == "Standard_ND96isr_H100_v5"
    within = _plan(resnet, rank="time", budget=70.0).best
    assert within is not None
    assert (within.cost or 99) <= 70.0


def test_no_price_is_no_cost(resnet: Workload) -> None:
    plan = make_plan(resnet, Wanted(sizes=_SIZES), lambda size: None)
    assert {each.cost for each in plan.candidates} == {None}
    assert draw_plan(plan) is None


def test_the_frontier_has_what_nothing_beats(resnet: Workload) -> None:
    plan = _plan(resnet)
    best = frontier(plan.candidates)
    for each in best:
        assert not any(
            (other.hours or 0) < (each.hours or 0) and (other.cost or 0) < (each.cost or 0) for other in plan.candidates
        )
    assert len(best) >= 2


def test_the_picture_and_the_table_show_both_ways_to_scale(
    resnet: Workload, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = _plan(resnet)
    assert (draw_plan(plan) or b"").startswith(b"\x89PNG")
    print_plan(plan, rows=1)
    shown = capsys.readouterr().out
    assert "Scaling up: one Standard_NC24ads_A100_v4. Scaling out: 2 nodes of Standard_NC24ads_A100_v4" in shown
    assert "Without InfiniBand, several nodes exchange gradients over Ethernet" in shown
    assert "To run the first: azureml-strategy submit resnet50_imagenet cluster=nc24ads_a100_v4\n" in shown


def test_every_command_is_one_that_submit_takes(resnet: Workload) -> None:
    gpt = read_workload("gpt_pipeline", ["strategy.num_stages=4", "model=gpt_350m"])
    for workload, words in ((resnet, ()), (gpt, ("pipeline", "model_parallel", "ddp"))):
        for each in _plan(workload, nodes=(1, 2), strategies=words).of_places():
            program, *arguments = shlex.split(submit_command(workload, each))[2:]
            job = plan_recipe(program, arguments)
            assert (job.cluster.vm_size, job.cluster.num_nodes) == (each.size.name, each.nodes)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("gpt_pipeline", ["strategy.micro_batches=8"]),
        ("resnet50_local_sgd", ["trainer.num_nodes=4", "trainer.devices=1", "cluster.processes_per_node=1"]),
        ("gpt_diloco", ["++trainer.num_nodes=3"]),
        ("resnet50_ddp", ["strategy=deepspeed_stage_3_offload", "cluster.tier=dedicated"]),
        ("gpt_tensor_parallel", ["strategy.activation_checkpointing=true", "trainer.devices=[0,1]"]),
    ],
)
def test_commands_of_every_strategy_compose(recipe: str, overrides: list[str]) -> None:
    workload = read_workload(recipe, overrides)
    sizes = (_SIZES[0], lookup_vm_size("NC48ads_A100_v4"))
    plan = _plan(workload, sizes=sizes, nodes=(2,), strategies=STRATEGIES, tier="low_priority")
    assert {each.how.strategy for each in plan.candidates} >= set(STRATEGIES) - {"pipeline"}
    for each in plan.candidates:
        name, *words = shlex.split(submit_command(workload, each))[2:]
        config = compose_recipe(find_recipe(name), words)
        cluster = config.cluster
        assert (cluster.vm_size, cluster.num_nodes, cluster.tier) == (each.size.name, 2, "low_priority")
        refused = each.how.strategy == "local_sgd" and each.size.infiniband
        assert config.strategy.get("allow_infiniband", refused) == refused
        assert config.trainer.num_nodes in (1, 2)
        per_node = each.prediction.gpus // 2
        assert config.trainer.devices in ("auto", per_node)
        assert (cluster.processes_per_node or each.size.gpus) == per_node
        with open_dict(config):
            del config["hydra"]
        check_config(config)


def test_a_bench_counts_for_the_size_on_which_it_ran() -> None:
    gpt = read_workload("gpt_ddp", ["model=gpt_125m"])
    for of, alike in ((None, False), ("NC24ads_A100_v4", True), ("standard_nd96isr_h100_v5", False)):
        slow, usual = (
            _plan(gpt, sizes=_SIZES[:1], nodes=(2,), strategies=("ddp",), across_gb=across, across_of=of)
            for across in (1.0, None)
        )
        ratio = usual.candidates[0].prediction.step_s / slow.candidates[0].prediction.step_s
        assert (ratio == 1.0) == alike
        assert any("1 GB/s" in sentence for sentence in slow.notes)


def test_gpus_of_a_node_that_a_recipe_names_are_planned() -> None:
    two = read_workload("gpt_ddp", ["trainer.devices=2"])
    plan = _plan(two, sizes=_SIZES, nodes=(1,), strategies=("ddp",))
    assert [each.prediction.gpus for each in plan.candidates] == [2]
    assert any("gpus_per_node is 2, and Standard_NC24ads_A100_v4 has 1" in sentence for sentence in plan.left_out)


def test_what_is_not_counted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["strategy=deepspeed_stage_2", "strategy.offload_optimizer=true", "trainer.max_time=00:01:00:00"]
    plan = _plan(read_workload("resnet50_imagenet", words), nodes=(1,), sizes=_SIZES[:1])
    print_plan(plan)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not counted: strategy.offload_optimizer=True, trainer.max_time=00:01:00:00." in shown
    assert "Counted are the 1,281,167 images of ImageNet-1k" in shown


def test_the_first_end_of_a_run_is_its_end(resnet: Workload) -> None:
    both = read_workload("resnet50_imagenet", ["trainer.max_steps=1000"])
    for workload, is_short in ((both, True), (resnet, False)):
        best = _plan(workload, nodes=(1,), strategies=("ddp",)).candidates[0]
        steps = (best.hours or 0) * 3600 / best.prediction.step_s
        assert (steps == pytest.approx(1000)) == is_short


@pytest.mark.parametrize(("name", "value"), [("samples", float("inf")), ("deadline", float("nan")), ("budget", -1.0)])
def test_wanted_numbers_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"{name} is {value}"):
        Wanted(sizes=_SIZES, **{name: value})
    with pytest.raises(PlanError, match="tier is 'cheap'"):
        Wanted(sizes=_SIZES, tier="cheap")


def test_the_users_own_strategy_stays_in_the_command_and_compiles_as_it_says() -> None:
    zero = read_workload("resnet50_imagenet", ["strategy=deepspeed_stage_2", "cluster.vm_size=Standard_D4"])
    by_name = {each.how.strategy: each for each in _plan(zero, nodes=(1,), sizes=_SIZES[:1]).candidates}
    command = submit_command(zero, by_name["deepspeed_stage_2"])
    assert command.endswith("resnet50_imagenet strategy=deepspeed_stage_2 cluster=nd96isr_h100_v5")
    assert by_name["ddp"].prediction.compute_s < 0.8 * by_name["deepspeed_stage_2"].prediction.compute_s


def test_shipped_recipes_of_other_strategies_are_planned() -> None:
    diloco = _plan(read_workload("gpt_diloco", []), nodes=(1,))
    assert diloco.candidates
    assert any("own strategy, diloco, is not planned" in sentence for sentence in diloco.left_out)
    in_float32 = read_workload("resnet50_imagenet", ["trainer.precision=32-true"])
    h100 = _plan(in_float32, nodes=(1,), sizes=_SIZES[:1]).best
    assert h100 is not None
    assert h100.prediction.samples_per_second > 10_000  # in TF32, as the recipe allows


def test_a_large_model_fits_only_where_it_is_sharded() -> None:
    gpt = read_workload("gpt_ddp", ["model=gpt_3b", "data.batch_size=1"])
    plan = _plan(gpt, sizes=_SIZES[:1], nodes=(1,), strategies=("ddp", "deepspeed_stage_3"), rank="time")
    by_name = {each.how.strategy: each for each in plan.candidates}
    assert (by_name["ddp"].memory_bytes or 0) > 2.5 * (by_name["deepspeed_stage_3"].memory_bytes or 0)
    assert by_name["deepspeed_stage_3"].fits
    small = _plan(gpt, sizes=(lookup_vm_size("NC64as_T4_v3"),), nodes=(1,), strategies=("ddp",))
    assert [each.fits for each in small.candidates] == [False]
    assert plan.best is not None
    assert plan.best.fits


def test_the_json_has_each_part(resnet: Workload, tmp_path: Path) -> None:
    content = json.loads(json.dumps(as_json(_plan(resnet))))
    first = content["candidates"][0]
    assert {"samples_per_second", "low", "high", "memory", "cost", "currency", "command", "naive"} <= first.keys()
    assert first["memory"]["parameters"] > 100e6


def test_a_strategy_that_cannot_run_it_is_left_out_in_a_sentence(resnet: Workload) -> None:
    with pytest.raises(PlanError, match="No strategy is known as 'zero'"):
        _plan(resnet, strategies=("zero",))
    odd = replace(resnet, settings={"num_stages": 3}, strategy="pipeline")
    plan = _plan(odd, strategies=("pipeline",), nodes=(1,))
    assert not plan.candidates
    assert any("multiple" in sentence for sentence in plan.left_out)
