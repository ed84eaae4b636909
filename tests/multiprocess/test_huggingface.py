"""Models of transformers under each strategy: the losses of one process with transformers alone, or the refusal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.multiprocess.conftest import RunJob, scripts_on_path

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
FAMILIES = ("llama", "qwen3", "gemma3", "mistral", "gpt2", "bert")
# What stands in the table of the page, by what a strategy says.
REFUSALS = {
    r"GPT2LMHeadModel of transformers has no tensor-parallel plan.*tensor_parallel_size=1": "no plan",
    r"BertForMaskedLM of transformers has no tensor-parallel plan.*tensor_parallel_size=1": "no plan",
    r"BertForMaskedLM.*azureml_model_parallel": "no plan",
    r"does not work with BertForMaskedLM: it is no causal language model.*sequence_parallel_size=1": "not causal",
}
COLUMNS = {
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "tensor": "tensor parallel",
    "both": "FSDP2 x tensor parallel",
    "sequence": "sequence parallel",
    "zero_2": "ZeRO-2",
    "zero_3": "ZeRO-3",
    "pipeline": "pipeline",
}


@pytest.fixture
def families() -> Iterator[Any]:
    with scripts_on_path():
        import families

        yield families


def documented() -> dict[tuple[str, str], str]:
    """The cells of the page's table, by family and column."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.read_text().splitlines()]
    header = next(line for line in lines if line[0] == "family")
    rows = [line for line in lines if line[0] in FAMILIES]
    return {(row[0], column): cell for row in rows for column, cell in zip(header[1:], row[1:], strict=True)}


def check(job: Any, families: Any, cells: list[tuple[str, str]], steps: int, lora: bool = False) -> None:
    """Compare what each cell gave with the oracle, and with the table of the page.

    One process cuts nothing, so each of its cells trains, whether there is a plan or not.
    """
    assert job.exit_code == 0, job.output
    table = {} if len(job.results) == 1 else documented()
    oracles: dict[tuple[str, int], list[float]] = {}
    for strategy, family in cells:
        found = job.results[0][f"{strategy} {family}"]
        said = table[family, COLUMNS.get(strategy, "FSDP2")] if table else "yes, LoRA too"
        if isinstance(found, str):
            assert [words for pattern, words in REFUSALS.items() if re.search(pattern, found, re.S)] == [said], found
            continue
        accumulated = 1 if strategy == "pipeline" else families.ACCUMULATED
        if (family, accumulated) not in oracles:
            oracles[family, accumulated] = families.alone(family, steps, lora, accumulated)
        expected = oracles[family, accumulated]
        assert len(found) == len(expected) == steps * accumulated
        assert found == pytest.approx(expected, rel=1e-5), (strategy, family)
        assert said == ("yes, LoRA too" if lora else said)
        assert said.startswith("yes"), (strategy, family)


def save(families: Any, names: tuple[str, ...], folder: Path) -> None:
    for name in names:
        families.make_model(name).save_pretrained(folder / name)


# These have tests of their own on two.
ALONE = ("local_sgd", "diloco", "zero_1", "zero_2", "offload")


@pytest.mark.parametrize(
    ("processes", "names", "more"),
    [
        (2, ("gemma3",), ()),
        pytest.param(2, ("gemma3", "gpt2"), ("recomputing", "zero_3"), marks=pytest.mark.exhaustive),
        pytest.param(1, ("gemma3", "gpt2"), ("recomputing", "zero_3", *ALONE), marks=pytest.mark.exhaustive),
    ],
    ids=["one on two", "two on two", "two on one"],
)
def test_each_strategy_trains(
    run_job: RunJob, families: Any, tmp_path: Path, processes: int, names: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """A family with tied weights, normalised heads and two kinds of attention; and one without a plan."""
    strategies, steps = ("ddp", "fsdp", "tensor", "sequence", "pipeline", *more), 3
    save(families, names, tmp_path / "models")
    job = run_job(
        *("huggingface.py", ",".join(strategies), ",".join(names), steps, tmp_path / "models", ""),
        processes_per_node=processes,
    )
    check(job, families, [(strategy, name) for strategy in strategies for name in names], steps)
    manual = families.alone(names[0], steps, clip=None)
    assert job.results[0]["manual"] == pytest.approx(manual, rel=1e-5), (
        "manual optimization, two backward passes a step"
    )


@pytest.mark.parametrize(
    ("processes", "strategies"),
    [
        (1, ("fsdp",)),
        (2, ("fsdp", "zero_2", "zero_3")),
        *(
            pytest.param(processes, ("ddp", "fsdp", "sequence", "zero_2", "zero_3"), marks=pytest.mark.exhaustive)
            for processes in (1, 2)
        ),
    ],
    ids=["some on one", "some on two", "all on one", "all on two"],
)
def test_adapters_train(
    run_job: RunJob, families: Any, tmp_path: Path, processes: int, strategies: tuple[str, ...]
) -> None:
    names, steps = ("llama",), 3
    save(families, names, tmp_path / "models")
    job = run_job(
        "huggingface.py",
        ",".join(strategies),
        ",".join(names),
        steps,
        tmp_path / "models",
        "lora",
        processes_per_node=processes,
    )
    check(job, families, [(strategy, name) for strategy in strategies for name in names], steps, lora=True)


@pytest.mark.parametrize("part", ["details", pytest.param("details,more", marks=pytest.mark.exhaustive)])
def test_users_modules_share_sequences(run_job: RunJob, families: Any, tmp_path: Path, part: str) -> None:
    """Rows of 11 tokens on two ranks, and what a module may do with the model besides asking for its loss."""
    save(families, ("llama",), tmp_path)
    job = run_job("huggingface.py", part, "llama", 1, tmp_path, "", processes_per_node=2)
    assert job.exit_code == 0, job.output
    found = job.results[0]["details"]
    assert_same(found["labels"], found["ddp"])
    assert_same(found["logits"], found["logits_ddp"])
    assert (found["labels"]["replicas"], found["ddp"]["replicas"]) == (1, 2)
    for name in ("gpt", "gpt_summed"):
        assert_same_gpt(found, name)
    assert found["gpt_resumed"]["losses"] == found["gpt"]["losses"][2:], "not bit for bit"
    assert job.results[1]["details"]["random"] == found["random"], "the ranks have other batches"
    assert found["restored"] == {"attention": "sdpa", "hooks": 0}
    assert_refuses_to_share(found)
    if part == "details,more":
        assert_same(found["recomputed"], found["ddp"])
        assert_same(found["bf16"], found["ddp"], rel=2e-2)
        assert_same_gpt(found, "gpt_learned")
        for each in ("losses", "val_loss"):
            assert found["fine_tuned"][each] == pytest.approx(found["fine_tuned_ddp"][each], rel=1e-5), each


def assert_same_gpt(found: dict[str, Any], name: str) -> None:
    for each in ("losses", "val_loss", "logits"):
        assert found[name][each] == pytest.approx(found[f"{name}_ddp"][each], rel=1e-5, abs=1e-6), (name, each)


def assert_same(found: dict[str, Any], expected: dict[str, Any], rel: float = 1e-5) -> None:
    assert len(found["losses"]) == 4
    assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
    assert found["metrics"]["val_loss"] == pytest.approx(expected["metrics"]["val_loss"], rel=rel)
    assert found["metrics"]["hits"] == pytest.approx(expected["metrics"]["hits"], abs=rel * 10)


def assert_refuses_to_share(found: dict[str, Any]) -> None:
    refused, calls = found["refused"], found["calls"]
    assert "BertForMaskedLM: it is no causal language model" in refused["bert"]
    assert "its rotary positions (dynamic) depend on how many tokens a rank sees" in refused["rotary"]
    assert "Plain holds no causal language model of transformers and has no method cut_sequences" in refused["plain"]
    assert "called with past_key_values" in calls["generate"]
    assert "LlamaModel was called without its head" in calls["body"]
    assert "position_ids start again inside a row" in calls["packed"]
    assert "called with output_hidden_states, which may need all tokens" in calls["hidden"]
    assert "needs an attention_mask of 0 and 1 for each token" in calls["mask"]
    assert "called with weights, which may need all tokens" in calls["unknown"]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("saved", [True, False], ids=["load_pretrained", "from_config"])
def test_each_strategy_trains_each_family(run_job: RunJob, families: Any, tmp_path: Path, saved: bool) -> None:
    two = ("ddp", "fsdp", "tensor", "sequence", "zero_2", "zero_3", "pipeline")
    four, steps = ("both", "sequence", "pipeline"), 20
    one = tuple(each for each in (*two, *ALONE, "recomputing") if each != "pipeline")  # which has no plan for bert
    save(families, FAMILIES, tmp_path / "models")
    folder = tmp_path / "models" if saved else ""
    for strategies, processes in ((one, 1), (two, 2), (four, 4)):
        job = run_job(
            *("huggingface.py", ",".join(strategies), ",".join(FAMILIES), steps, folder, ""),
            processes_per_node=processes,
        )
        check(job, families, [(strategy, name) for strategy in strategies for name in FAMILIES], steps)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_adapters_of_each_family_train(run_job: RunJob, families: Any, tmp_path: Path) -> None:
    strategies, steps = ("ddp", "fsdp", "sequence", "zero_2", "zero_3"), 20
    save(families, FAMILIES, tmp_path / "models")
    job = run_job(
        *("huggingface.py", ",".join(strategies), ",".join(FAMILIES), steps, tmp_path / "models", "lora"),
        processes_per_node=2,
    )
    check(job, families, [(strategy, name) for strategy in strategies for name in FAMILIES], steps, lora=True)
