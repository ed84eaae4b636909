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
}
COLUMNS = {
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "tensor": "tensor parallel",
    "both": "FSDP2 x tensor parallel",
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
    """Compare what each cell gave with the oracle, and with the table of the page."""
    assert job.exit_code == 0, job.output
    table = documented()
    oracles: dict[tuple[str, int], list[float]] = {}
    for strategy, family in cells:
        found = job.results[0][f"{strategy} {family}"]
        said = table[family, COLUMNS[strategy]]
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


def test_each_strategy_trains_two_families(run_job: RunJob, families: Any, tmp_path: Path) -> None:
    """One with tied weights, normalised heads and two kinds of attention; one without a plan."""
    names, strategies, steps = ("gemma3", "gpt2"), ("ddp", "fsdp", "tensor", "zero_3", "pipeline"), 3
    save(families, names, tmp_path / "models")
    job = run_job(
        "huggingface.py", ",".join(strategies), ",".join(names), steps, tmp_path / "models", "", processes_per_node=2
    )
    check(job, families, [(strategy, name) for strategy in strategies for name in names], steps)
    manual = families.alone(names[0], steps, clip=None)
    assert job.results[0]["manual"] == pytest.approx(manual, rel=1e-5), (
        "manual optimization, two backward passes a step"
    )


def test_adapters_train(run_job: RunJob, families: Any, tmp_path: Path) -> None:
    names, strategies, steps = ("llama",), ("ddp", "fsdp", "zero_2", "zero_3"), 3
    save(families, names, tmp_path / "models")
    job = run_job(
        "huggingface.py",
        ",".join(strategies),
        ",".join(names),
        steps,
        tmp_path / "models",
        "lora",
        processes_per_node=2,
    )
    check(job, families, [(strategy, name) for strategy in strategies for name in names], steps, lora=True)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("saved", [True, False], ids=["load_pretrained", "from_config"])
def test_each_strategy_trains_each_family(run_job: RunJob, families: Any, tmp_path: Path, saved: bool) -> None:
    two, four, steps = ("ddp", "fsdp", "tensor", "zero_2", "zero_3", "pipeline"), ("both", "pipeline"), 20
    save(families, FAMILIES, tmp_path / "models")
    folder = tmp_path / "models" if saved else ""
    for strategies, processes in ((two, 2), (four, 4)):
        job = run_job(
            *("huggingface.py", ",".join(strategies), ",".join(FAMILIES), steps, folder, ""),
            processes_per_node=processes,
        )
        check(job, families, [(strategy, name) for strategy in strategies for name in FAMILIES], steps)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_adapters_of_each_family_train(run_job: RunJob, families: Any, tmp_path: Path) -> None:
    strategies, steps = ("ddp", "fsdp", "zero_2", "zero_3"), 20
    save(families, FAMILIES, tmp_path / "models")
    job = run_job(
        *("huggingface.py", ",".join(strategies), ",".join(FAMILIES), steps, tmp_path / "models", "lora"),
        processes_per_node=2,
    )
    check(job, families, [(strategy, name) for strategy in strategies for name in FAMILIES], steps, lora=True)
