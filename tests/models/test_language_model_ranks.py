"""Two real ranks against one process on the same text: losses, parameters, validation."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from tests.emulated import SHARED_MACHINE
from tests.models.ranks import run_ranks, wait_for
from tests.preloaded import Forked

_RUN = """
import json, sys
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from azureml_strategy.data import TextDataModule
from azureml_strategy.models import GPTConfig, LanguageModel, linear_loss

folder, devices = Path(sys.argv[1]), int(sys.argv[2])
seed_everything(3, verbose=False)
torch.set_num_threads(1)
if devices > 1:  # the ranks compute the loss in chunks, one process of all logits
    linear_loss._FEW_LOGITS, linear_loss._CHUNK = 0, {"cpu": 50}


class Recorded(LanguageModel):
    losses, tokens = [], []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        self.tokens.append(sorted(batch[0][:, :6].tolist()))
        return loss


config = GPTConfig(vocab_size=256, context=32, layers=2, width=32, heads=4, mlp_width=88)
model = Recorded(config, learning_rate=1e-2, warmup_steps=5, seed=3)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
on = dict(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", **quiet)
trainer = Trainer(max_steps=24, gradient_clip_val=1.0, limit_val_batches=0, **on)
data = TextDataModule(sequence_length=32, batch_size=8 // devices, cache=folder / "cache")
trainer.fit(model, datamodule=data)
texts = dict(root=folder / "texts", validation_fraction=0.6)
short = TextDataModule(**texts, sequence_length=32, batch_size=4, cache=folder / "cache")
(metrics,) = Trainer(**on).validate(model, datamodule=short, verbose=False)
parameters = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
facts = dict(losses=model.losses, tokens=model.tokens, metrics=metrics, parameters=parameters)
(folder / f"{trainer.global_rank}-of-{devices}.json").write_text(json.dumps(facts))
if devices > 1:
    torch.distributed.destroy_process_group()
"""

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Facts, list[Facts]]:
    """What one process saw, and what each of two did; all three write the tokens of the same texts at once."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "texts").mkdir()
    for number in range(7):
        (folder / "texts" / f"{number}.txt").write_text(f"{number} bottles, " * 31)
    (folder / "run.py").write_text(_RUN)
    script = folder / "run.py"
    alone = Forked([str(script), str(folder), "1"], {**os.environ, **SHARED_MACHINE}, text=True)
    run_ranks(script, folder, 2, ranks=2, timeout=240)
    wait_for(alone, timeout=240)
    facts = [json.loads((folder / f"{name}.json").read_text()) for name in ("0-of-1", "0-of-2", "1-of-2")]
    return facts[0], facts[1:]


def test_ranks_share_the_batches_of_one_process(runs: tuple[Facts, list[Facts]]) -> None:
    alone, ranks = runs
    assert len(alone["tokens"]) == 24
    joined = [sorted(first + second) for first, second in zip(*(rank["tokens"] for rank in ranks), strict=True)]
    assert joined == alone["tokens"]


def test_losses_and_parameters_are_those_of_one_process(runs: tuple[Facts, list[Facts]]) -> None:
    alone, ranks = runs
    means = [(first + second) / 2 for first, second in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert means == pytest.approx(alone["losses"], rel=1e-5)
    assert alone["losses"][-1] < alone["losses"][0] - 1
    assert ranks[0]["parameters"] == ranks[1]["parameters"] == pytest.approx(alone["parameters"], abs=2e-4)


def test_validation_counts_each_token_once(runs: tuple[Facts, list[Facts]]) -> None:
    """The ranks read a batch more than one process, of which all but a few sequences are padding."""
    alone, ranks = runs
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    assert ranks[0]["metrics"] == pytest.approx(alone["metrics"], rel=1e-4)
