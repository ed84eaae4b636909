"""Two real ranks against one process: metrics, learning rate and shares of the data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image
from tests.models.ranks import run_ranks
from torch import nn

from azureml_strategy.data import ImageFolderDataModule
from azureml_strategy.models import ImageClassifier

# Before 3.11.8 a process may never begin that is forked while a thread of gloo's enters Python: python/cpython#112275.
_WORKERS = 1 if sys.version_info >= (3, 11, 8) else 0
_RANK = """
import json, sys, torch
from torch import nn
from lightning.pytorch import Trainer
from azureml_strategy.data import ImageFolderDataModule
from azureml_strategy.models import ImageClassifier

root = sys.argv[1]
torch.manual_seed(0)
network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
classifier = ImageClassifier(network, learning_rate=1.0, warmup_epochs=0)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, accumulate_grad_batches=2, **quiet)
data = ImageFolderDataModule(root, image_size=8, batch_size=2, num_workers=int(sys.argv[2]))
trainer.fit(classifier, datamodule=data)
draws = list(trainer.train_dataloader.sampler)
peak = trainer.optimizers[0].param_groups[0]["initial_lr"]
steps = trainer.global_step
trainer.save_checkpoint(root + "/model.ckpt")
metrics = trainer.validate(classifier, datamodule=data, verbose=False)[0]
with open(f"{root}/rank{trainer.global_rank}.json", "w") as file:
    json.dump({"metrics": metrics, "draws": draws, "peak": peak, "steps": steps}, file)
torch.distributed.destroy_process_group()
"""


def _write(root: Path) -> None:
    """Noise in three classes: 18 images for training, 11 for validation, of which one is unreadable."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 18), ("val", 11)):
        for number in range(count):
            folder = root / part / "abc"[number % 3]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (10, 10, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    (root / "val" / "b" / "4.png").write_bytes(b"")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    root = tmp_path_factory.mktemp("images")
    _write(root)
    (root / "rank.py").write_text(_RANK)
    run_ranks(root / "rank.py", root, _WORKERS, ranks=2, timeout=200)
    return root, [json.loads((root / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.filterwarnings("ignore:Skipped")
def test_metrics_are_those_of_one_process_that_reads_everything(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    root, (first, second) = ranks
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    classifier = ImageClassifier.load_from_checkpoint(root / "model.ckpt", network=network)
    data = ImageFolderDataModule(root, image_size=8, batch_size=5, num_workers=0)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    (expected,) = trainer.validate(classifier, datamodule=data, verbose=False)
    assert first["metrics"] == second["metrics"]
    assert first["metrics"] == pytest.approx(expected, rel=1e-5)
    assert expected["val/top1"] * 10 == pytest.approx(round(expected["val/top1"] * 10))  # of ten, not eleven


def test_the_learning_rate_counts_both_ranks_and_the_accumulation(
    ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in ranks[1]:
        assert rank["peak"] == pytest.approx(1.0 * (2 * 2 * 2) / 256)
        assert rank["steps"] == 2 * 2  # 4 batches an epoch and rank, two of them a step


def test_the_ranks_trained_on_different_images(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (set(rank["draws"]) for rank in ranks[1])
    assert not first & second
    assert {draw % 18 for draw in first | second} == set(range(18))
    assert {draw // 18 for draw in first | second} == {1}  # the second epoch, which Lightning told the sampler


def test_a_checkpoint_of_two_ranks_has_the_names_of_one(ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    state = torch.load(ranks[0] / "model.ckpt", weights_only=False)["state_dict"]
    assert next(iter(state)) == "network.0.weight"
