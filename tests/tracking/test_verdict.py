import inspect
import math
import re
import types
import weakref
from unittest.mock import Mock

import pytest
import torch

from azureml_strategy.strategies import AzureMLDDPStrategy
from azureml_strategy.tracking.remedies import FUSED, SETTINGS, RunFacts
from azureml_strategy.tracking.report import _is_compiled_run, has_compiled_parts
from azureml_strategy.tracking.timing.meters import STEP_PARTS, Part
from azureml_strategy.tracking.timing.summary import Totals, summarize
from azureml_strategy.tracking.verdict import NAMES, PHASES, judge, mfu_text

BUSY = {"data_wait": 0.01, "forward": 0.33, "backward": 0.62, "optimizer": 0.02, "other": 0.02}


RECIPE = frozenset(
    {
        "data.num_workers",
        "data.batch_size",
        "trainer.precision",
        "strategy.gradient_compression",
        "strategy.bucket_cap_mb",
    }
)


COMPILES = RECIPE | {"strategy.compile", "strategy.compile_mode"}
DDP = "AzureMLDDPStrategy"


def with_share(name, share):
    rest = (1 - share) / 2
    return {"forward": rest, "backward": rest, name: share}


def test_a_run_that_waits_for_data_is_told_so_with_its_workers_and_the_gain_by_amdahls_law():
    verdict = judge(with_share("data_wait", 0.4), facts=RunFacts(loader_workers=2, cost=50.0, keys=RECIPE))
    assert verdict.part == "data_wait"
    assert verdict.headline == "This run waits most for data: 40% of each step."
    first = verdict.advice[0]
    assert "with 2 workers a rank" in first.why
    assert "data.num_workers" in first.action
    assert first.speed_up == pytest.approx(1 / 0.6)
    assert first.gain == "At most 67% faster, 20.00 USD less for this run."
    assert verdict.line == f"{verdict.headline} {first.action} {first.gain}"


def test_the_hook_that_takes_the_rest_is_named():
    verdict = judge(with_share("other", 0.4), facts=RunFacts(hook="Ema.on_train_batch_end, 4.1 ms a call"))
    assert "Ema.on_train_batch_end, 4.1 ms a call" in verdict.line
    assert "log_every_n_steps" in judge(with_share("other", 0.4)).line


def test_a_loader_without_workers_is_told_to_have_some():
    first = judge(with_share("data_wait", 0.4), facts=RunFacts(loader_workers=0)).advice[0]
    assert "no workers" in first.why
    assert first.gain == "At most 67% faster."


@pytest.mark.parametrize(
    ("part", "advised"),
    [
        ("copy", "pin_memory"),
        ("communication", "bench"),
        ("bubble", "micro_batches"),
        ("optimizer", "fused"),
        ("other", "log_every_n_steps"),
    ],
)
def test_each_part_has_its_own_advice(part, advised):
    first = judge(with_share(part, 0.3)).advice[0]
    assert first.part == part
    assert advised in first.action


def test_communication_over_sockets_between_nodes_leads_to_infiniband_and_ddp_to_compression():
    shares = with_share("communication", 0.3)
    assert "InfiniBand" in judge(shares, facts=RunFacts(nodes=2, transport="socket")).advice[0].action
    ddp = judge(shares, facts=RunFacts(nodes=2, transport="ib", strategy="AzureMLDDPStrategy", keys=RECIPE)).advice[0]
    assert "gradient_compression=bf16" in ddp.action


def test_a_slow_rank_takes_its_part_of_the_communication():
    facts = RunFacts(slow_ranks=("rank 3 (node-1, cuda:0)",), slow_share=0.2)
    verdict = judge(with_share("communication", 0.3), facts=facts)
    assert verdict.headline == "This run waits most for rank 3 (node-1, cuda:0): 20% of each step."
    assert {each.part: round(each.share, 6) for each in verdict.advice} == {"slow_rank": 0.2, "communication": 0.1}
    assert "bench --pairs" in verdict.advice[0].action


def test_a_run_that_computes_is_left_alone_unless_its_mfu_is_low():
    assert judge(BUSY).headline == "This run waits for nothing that is worth a change: 95% of a step computes."
    assert judge(BUSY, facts=RunFacts(mfu=0.45)).advice == ()
    slow = judge(BUSY, facts=RunFacts(mfu=0.1, precision="32-true"))
    assert slow.part == "computing"
    assert slow.advice[0].share == pytest.approx(0.95 - 0.25)
    assert "bf16-mixed" in slow.advice[0].action
    assert "bf16-mixed" not in judge(BUSY, facts=RunFacts(mfu=0.1, precision="bf16-mixed")).advice[0].action


def test_what_waits_comes_before_what_computes_slowly():
    shares = {"data_wait": 0.27, "forward": 0.3, "backward": 0.4, "other": 0.03}
    verdict = judge(shares, facts=RunFacts(mfu=0.0042))
    assert verdict.headline == "This run waits most for data: 27% of each step."
    assert [each.part for each in verdict.advice] == ["data_wait", "computing"]
    assert verdict.advice[1].what == "MFU is 0.42%"


def test_no_gain_is_promised_where_nobody_knows_what_the_network_can_reach():
    slow = judge(BUSY, facts=RunFacts(mfu=0.1, precision="bf16-mixed"))
    assert slow.advice[0].gain == ""
    assert "faster" not in slow.line


LAUNCHES = {"forward": 0.02, "backward": 0.05, "host": 0.7, "optimizer": 0.1, "other": 0.13}


@pytest.mark.parametrize(
    ("facts", "advised", "kept_back"),
    [
        (RunFacts(), "Compile the model (torch.compile), or", "strategy.compile"),
        (RunFacts(strategy=DDP), 'Compile the model (AzureMLDDPStrategy(compile="blocks")), or', "torch.compile"),
        (RunFacts(compiled=True), "Make the batch larger", "ompile"),
        (RunFacts(strategy=DDP, compiled=True), "Replay CUDA graphs (AzureMLDDPStrategy(..., compile_mode=", "Compile"),
        (RunFacts(strategy=DDP, compiled=True, replays=True), "Make the batch larger", "ompile"),
        (RunFacts(keys=RECIPE), "Make the batch larger (data.batch_size), or", "ompile"),
        (RunFacts(keys=COMPILES), "Compile the model (strategy.compile=blocks), or", "torch.compile"),
        (
            RunFacts(keys=COMPILES, compiled=True, strategy=DDP),
            "Replay CUDA graphs (strategy.compile_mode=reduce-overhead), or",
            "compile=",
        ),
        (RunFacts(keys=COMPILES, compiled=True, strategy="PipelineStrategy"), "Make the batch larger", "ompile"),
    ],
)
def test_a_gpu_that_waits_for_its_host_gets_what_can_be_done_in_this_run(facts, advised, kept_back):
    verdict = judge(LAUNCHES, facts=facts)
    assert verdict.headline == "This run waits most for the host to launch kernels: 70% of each step."
    assert verdict.advice[0].action.startswith(advised)
    assert kept_back not in verdict.line


KEY = re.compile(r"\b(?:data|trainer|strategy|model|checkpoint|profile)\.\w+")


@pytest.mark.parametrize("keys", [None, frozenset({"data.num_workers"}), RECIPE])
@pytest.mark.parametrize("compiled", [True, False])
def test_no_key_is_named_that_the_recipe_does_not_have(keys, compiled):
    for strategy in ("AzureMLDDPStrategy", "PipelineStrategy"):
        for workers in (0, None):
            facts = RunFacts(keys=keys, compiled=compiled, mfu=0.1, strategy=strategy, loader_workers=workers)
            parts = [name for name in NAMES if name not in ("forward", "backward")]
            texts = [each.action for part in parts for each in judge(with_share(part, 0.3), facts=facts).advice]
            texts += [each.action for each in judge({}, dict.fromkeys(PHASES, 900.0), facts).advice]
            assert set(KEY.findall(" ".join(texts))) <= (keys or frozenset())


def test_compiled_parts_of_a_module_are_found():
    plain, inside, whole = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3))
    inside[0].compile()
    assert not has_compiled_parts(plain)
    assert has_compiled_parts(inside)
    assert has_compiled_parts(torch.nn.ModuleList([torch.compile(whole)]))
    plain.step = torch.compile(lambda value: value)
    assert has_compiled_parts(plain)
    plain.step = types.MethodType(plain.step, plain)
    assert has_compiled_parts(plain)


@pytest.mark.parametrize("how", ["blocks", "off"])
def test_a_run_that_its_strategy_compiles_is_compiled(how):
    """The report looks before the strategy has begun, and after it has ended."""
    trainer = Mock(strategy=AzureMLDDPStrategy(compile=how), lightning_module=torch.nn.Linear(2, 2))
    assert _is_compiled_run(trainer) == (how == "blocks")


class Strict(dict):
    __getattr__ = dict.__getitem__


class Lenient(dict):
    __getattr__ = dict.get


class Anything:
    def __getattr__(self, name):
        return self


def test_what_a_module_holds_is_not_asked_for_attributes_that_it_may_make_up():
    """Settings with `__getattr__ = dict.__getitem__` raise KeyError, and mocks or RPC proxies have every attribute."""
    module = torch.nn.Linear(2, 2)
    for each in (Strict(width=4), Lenient(width=4), Anything(), Mock(), weakref.proxy(type("Gone", (), {})())):
        vars(module)["held"] = each
        assert not has_compiled_parts(module)


def test_parts_of_the_run_are_weighed_against_parts_of_the_step():
    times = {"training": 500.0, "validation": 400.0, "checkpoint": 100.0}
    verdict = judge(with_share("data_wait", 0.3), times)
    assert {each.part: round(each.share, 6) for each in verdict.advice} == {
        "validation": 0.4,
        "data_wait": 0.15,
        "checkpoint": 0.1,
    }
    assert verdict.headline == "This run waits most for validation: 40% of its time."


def test_start_up_counts_in_a_long_run_only():
    assert judge(BUSY, {"startup": 20.0, "training": 10.0}).advice == ()
    assert judge(BUSY, {"startup": 2000.0, "training": 1000.0}).part == "startup"


@pytest.mark.parametrize("shares", [{}, {"data_wait": math.nan}, {"a stranger's": 0.5}])
def test_without_shares_it_says_that_nothing_was_measured(shares):
    verdict = judge(shares)
    assert not verdict.measured
    assert verdict.line == "This run did not measure where its time goes."


def test_values_that_are_no_numbers_are_left_out():
    verdict = judge(with_share("other", 0.3) | {"copy": math.nan}, {"training": 900.0, "validation": math.inf})
    assert [each.part for each in verdict.advice] == ["other"]


@pytest.mark.parametrize("part", NAMES)
def test_a_step_of_one_part_alone_has_a_finite_gain(part):
    for advice in judge({part: 1.0}).advice:
        assert math.isfinite(advice.speed_up)


@pytest.mark.parametrize(
    ("optimizer", "advised", "kept_back"),
    [
        ("", "fused=True", "AdamW(fused"),
        ("SGD", "Use SGD(fused=True) in configure_optimizers, or larger batches", "Adam"),
        ("SGD(fused=True)", "Use larger batches", "fused"),
        ("RMSprop", "Use larger batches", "fused"),
        ("DeepSpeedCPUAdam", "Use larger batches", "fused"),
    ],
)
def test_the_optimizer_that_the_run_has_is_named(optimizer, advised, kept_back):
    action = judge(with_share("optimizer", 0.3), facts=RunFacts(optimizer=optimizer)).advice[0].action
    assert advised in action
    assert kept_back not in action


def test_a_recipe_that_has_a_key_for_the_fused_optimizer_is_told_it() -> None:
    facts = RunFacts(optimizer="AdamW", keys=RECIPE | {"model.fused"})
    assert judge(with_share("optimizer", 0.3), facts=facts).advice[0].action.startswith("Use model.fused=true, or")


def test_torch_has_the_fused_optimizers_that_are_named():
    knowing = {
        name
        for name, each in vars(torch.optim).items()
        if isinstance(each, type) and "fused" in inspect.signature(each).parameters
    }
    assert set(FUSED) <= knowing
    for name in FUSED:
        getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(2))], lr=0.1, fused=True)


@pytest.mark.parametrize(
    ("mfu", "text"),
    [(0.0042, "0.42%"), (0.17, "17%"), (0.013, "1.3%"), (0.00004, "0.0040%"), (1.04, "104%"), (0, "0%")],
)
def test_an_mfu_has_two_significant_digits(mfu: float, text: str) -> None:
    assert mfu_text(mfu) == text


@pytest.mark.parametrize("steps", [0, 1, 11])
def test_few_steps_judge_nothing(steps: int) -> None:
    verdict = judge(with_share("data_wait", 0.42), {"validation": 900.0}, RunFacts(steps=steps))
    assert verdict.advice == ()
    assert "too few" in verdict.line
    assert "faster" not in verdict.line
    assert judge(with_share("data_wait", 0.42), facts=RunFacts(steps=1000)).part == "data_wait"


def test_a_part_within_its_own_noise_is_not_named() -> None:
    shares = with_share("data_wait", 0.4)
    assert judge(shares, errors={"data_wait": 0.05}).part == "data_wait"
    assert judge(shares, errors={"data_wait": 0.15}).part == ""


@pytest.mark.parametrize(
    "shares",
    [
        {"forward_wait": 0.95, "communication": 0.95, "forward": 0.03},  # 193 %
        {"data_wait": 0.3, "forward": 0.2},
        {"data_wait": 0.9, "forward": 0.4, "backward": -0.3},
    ],
)
def test_shares_that_are_not_a_whole_step_judge_nothing(shares: dict[str, float]) -> None:
    assert not judge(shares).measured
    assert judge({}, {"training": 500.0, "validation": 500.0}) == judge(
        shares, {"training": 500.0, "validation": 500.0}
    )


@pytest.mark.parametrize("reduced_s", [0.0, 0.25])
def test_a_part_with_a_span_of_its_own_counts_also_where_no_meter_tells_it_apart(reduced_s: float) -> None:
    """A pipeline's reduction on a GPU: without it the shares would be no whole step, and the run not measured."""
    seconds = {Part.FORWARD: 0.25, Part.BACKWARD: 0.5, Part.COMMUNICATION: reduced_s}
    parts = tuple(seconds.get(part, 0.0) for part in STEP_PARTS)
    totals = Totals(1.0, 8.0, sum(parts), 0.0, 0.0, parts)
    found = summarize(totals, [sum(parts)], ranks=1, replicas=1, unknown=frozenset({Part.COMMUNICATION})).shares
    assert sum(found.values()) == pytest.approx(1)
    assert found.get("communication", 0.0) == pytest.approx(reduced_s / sum(parts))
    assert ("communication" in found) == bool(reduced_s)


@pytest.mark.parametrize("transport", ["socket", "ib", ""])
def test_on_one_machine_no_node_and_no_network_is_accused(transport: str) -> None:
    facts = RunFacts(
        nodes=2,
        transport=transport,
        one_machine=True,
        strategy="AzureMLDDPStrategy",
        slow_ranks=("rank 1",),
        slow_share=0.2,
    )
    found = judge(with_share("communication", 0.5), facts=facts)
    assert {each.part for each in found.advice} == {"communication", "slow_rank"}
    text = " ".join(each.why + each.action + each.gain for each in found.advice)
    assert not any(word in text for word in ("replace", "VM size", "slower than", "faster", "compression"))
    assert "accuses no node" in text


@pytest.mark.parametrize(
    "keys", [None, RECIPE | {"checkpoint.asynchronous", "data.pin_memory", "strategy.bucket_cap_mb"}]
)
def test_nobody_is_told_to_set_what_is_set(keys: frozenset[str] | None) -> None:
    def told(settings: tuple[str, ...]) -> str:
        facts = RunFacts(keys=keys, strategy="AzureMLDDPStrategy", settings=frozenset(settings))
        found = [judge(with_share(part, 0.3), facts=facts) for part in ("copy", "communication")]
        found.append(judge({}, {"training": 500.0, "checkpoint": 500.0}, facts))
        return " ".join(each.action for verdict in found for each in verdict.advice)

    for name in SETTINGS:
        assert name in told(())
        assert name not in told((name,)) or name == "gradient_compression"
    assert "Compress" not in told(("gradient_compression",))


def test_a_recipe_without_a_key_to_pin_memory_is_not_told_to_pin_it() -> None:
    (found,) = judge(with_share("copy", 0.5), facts=RunFacts(keys=RECIPE)).advice
    assert "pin_memory" not in found.action
    assert "Send smaller data" in found.action


def test_a_script_is_not_told_a_recipes_keys() -> None:
    texts = [each.action for each in judge({}, dict.fromkeys(PHASES, 900.0)).advice]
    assert "every_minutes of JobCheckpoint" in " ".join(texts)
    assert "check_val_every_n_epoch of the Trainer" in " ".join(texts)
