"""The verbs plan and sizes, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from azureml_strategy.cli import main


def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, drawn = tmp_path / "plan.json", tmp_path / "plan.png"
    words = ["plan", "resnet50_imagenet", "--sizes", "nd96isr_h100_v5,nc24ads_a100_v4", "trainer.max_epochs=1"]
    prices = ["--price", "nd96isr_h100_v5=98", "--price", "NC24ads_A100_v4=3.7", "--currency", "EUR"]
    assert main([*words, "--nodes", "1,2", *prices, "--output", str(written), "--plot", str(drawn)]) == 0
    shown = capsys.readouterr().out
    assert "To run the first: azureml-strategy submit resnet50_imagenet trainer.max_epochs=1 cluster=" in shown
    assert "EUR" in shown
    assert len(json.loads(written.read_text())["candidates"]) == 2 * 2 * 4
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_measured_step_and_a_slow_loader(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "resnet50_imagenet", "--sizes", "nc24ads_a100_v4", "--nodes", "1"]
    assert main([*words, "--step-ms", "100", "--measured-on", "A100 PCIe 80GB"]) == 0
    assert "2,560" in capsys.readouterr().out
    assert main([*words, "--loader-rate", "300"]) == 0
    shown = capsys.readouterr().out
    assert " 300 " in shown
    assert "| data" in shown


def test_the_tier_of_the_prices_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "resnet50_imagenet", "--sizes", "nc24ads_a100_v4", "--nodes", "1", "cluster.tier=dedicated"]
    assert main([*words, "--price", "nc24ads_a100_v4=1", "--tier", "low_priority"]) == 0
    shown = capsys.readouterr().out
    assert "submit resnet50_imagenet cluster=nc24ads_a100_v4 cluster.tier=low_priority\n" in shown


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["resnet50"], "There is no recipe 'resnet50'"),
        (["resnet50_imagenet", "--sizes", "banana"], "'banana' is not the name of an Azure VM size"),
        (["resnet50_imagenet", "--nodes", "two"], "--nodes is 'two'"),
        (["resnet50_imagenet", "--samples", "inf"], "--samples is inf"),
        (["resnet50_imagenet", "--samples", "nan"], "--samples is nan"),
        (["resnet50_imagenet", "--sizes", "nc24ads_a100_v4", "trainer.devices=2"], "has 1. Give 1 or fewer"),
        (["finetune_lm"], "model.path"),
        (["resnet50_imagenet", "--nodes", "0"], "A job has at least one node"),
        (["resnet50_imagenet", "--price", "nc24ads_a100_v4"], "Write --price SIZE=X"),
        (["resnet50_imagenet", "--price", "nc24ads_a100_v4=-1"], "is no price"),
        (["resnet50_imagenet", "--step-ms", "10"], "--measured-on"),
        (["resnet50_imagenet", "--deadline", "-1"], "--deadline is -1.0"),
        (["resnet50_imagenet", "--bench", "absent.json"], "absent.json"),
        (["resnet50_imagenet", "--sizes", "nc24ads_a100_v4", "--plot", "x.png"], "no picture without hours and cost"),
        (["resnet50_imagenet", "--sizes", "NC24rs_v3"], "was retired"),
    ],
)
def test_wrong_words_are_said_to_be(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    assert says in capsys.readouterr().err


def test_sizes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sizes", "--gpu", "h100", "--infiniband", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["size"] for each in found] == ["Standard_ND96isr_H100_v5"]
    assert {"ResNet-50 images/s", "GPT 7B tokens/s", "InfiniBand", "GB/s, two nodes"} <= found[0].keys()
    assert main(["sizes", "--price", "nc24ads_a100_v4=3.7"]) == 0
    assert "3.70 USD" in capsys.readouterr().out
    assert main(["sizes", "--gpu", "H10"]) == 2
    assert "No size has a GPU called 'H10'" in capsys.readouterr().err
