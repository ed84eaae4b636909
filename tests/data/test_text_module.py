"""The data module of text in a real Trainer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from azureml_strategy.data import CorpusError, TextDataModule

LENGTH = 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """24 documents of 17 bytes, 18 tokens each; every eighth byte tells where it stands."""
    (tmp_path / "texts").mkdir()
    for number in range(24):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(f"{number:02}" * 8 + "\n")
    return tmp_path / "texts"


class _Record(LightningModule):
    """Notes the inputs of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[str, int, list[list[int]]]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        self.seen.append(("train", self.current_epoch, inputs.tolist()))
        return self.weight * 1.0

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.seen.append(("val", self.current_epoch, batch[0].tolist()))

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.seen.append(("test", self.current_epoch, batch[0].tolist()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def sequences(self, stage: str, epoch: int = 0) -> list[list[int]]:
        return [row for where, when, rows in self.seen if (where, when) == (stage, epoch) for row in rows]


def _trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    defaults = {"accelerator": "cpu", "devices": 1, "num_sanity_val_steps": 0, "enable_model_summary": False}
    return Trainer(**{**quiet, **defaults, **arguments})


def _module(root: Path, **arguments: Any) -> TextDataModule:
    cache = root.parent / "cache"
    return TextDataModule(root, **{"sequence_length": LENGTH, "batch_size": 4, "cache": cache, **arguments})


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_hold_the_same_sequences_in_another_order(root: Path, workers: int) -> None:
    record = _Record()
    module = _module(root, num_workers=workers, validation_fraction=0.25)
    _trainer(max_epochs=2).fit(record, datamodule=module)
    first, second = record.sequences("train", 0), record.sequences("train", 1)
    assert len(first) == len(second) == (18 * 18 - 1) // LENGTH  # 40, ten full batches
    assert sorted(first) == sorted(second)
    assert first != second
    validation = record.sequences("val", 0)
    assert len(validation) == (6 * 18 - 1) // LENGTH
    assert validation == record.sequences("val", 1)
    assert module.vocab_size == 256


def test_the_order_is_that_of_the_seed_whatever_the_workers(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def order(seed: int, workers: int) -> list[Any]:
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        record = _Record()
        _trainer(max_epochs=1).fit(record, datamodule=_module(root, num_workers=workers))
        return record.seen

    assert order(3, 0) == order(3, 2)
    assert order(3, 0) != order(4, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [3, 10, 13])
@pytest.mark.parametrize("end", [{"max_epochs": 3}, {"max_steps": 30}])
@pytest.mark.filterwarnings("error:You're resuming:UserWarning")
def test_a_resumed_run_reads_what_an_uninterrupted_one_would(
    root: Path, workers: int, stop: int, end: dict[str, int]
) -> None:
    """Within the first epoch of ten batches, at its end, and within the second."""

    def run(path: Path | None = None) -> list[Any]:
        record = _Record()
        save = ModelCheckpoint(root.parent / "saved", every_n_train_steps=stop, save_top_k=-1, filename="{step}")
        settings = {"callbacks": [save], "enable_checkpointing": True, "limit_val_batches": 0}
        module = _module(root, num_workers=workers, validation_fraction=0.25)
        _trainer(**end, **settings).fit(record, datamodule=module, ckpt_path=path)
        return record.seen

    whole = run()
    assert len(whole) == 30
    assert run(root.parent / "saved" / f"step={stop}.ckpt") == whole[stop:]


def test_the_test_set_is_the_validation_set(root: Path) -> None:
    record = _Record()
    trainer = _trainer(max_epochs=1)
    trainer.fit(record, datamodule=_module(root))
    trainer.test(record, datamodule=_module(root), verbose=False)
    assert record.sequences("test", 1) == record.sequences("val", 0) != []


def test_without_a_validation_fraction_all_is_for_training(root: Path) -> None:
    record = _Record()
    _trainer(max_epochs=1).fit(record, datamodule=_module(root, validation_fraction=0.0))
    assert len(record.sequences("train")) == (24 * 18 - 1) // LENGTH // 4 * 4
    assert record.sequences("val") == []


def test_tokens_are_made_once(root: Path) -> None:
    _module(root).prepare_data()
    (folder,) = (root.parent / "cache").iterdir()
    before = (folder / "train.bin").stat()
    _module(root, sequence_length=4).prepare_data()
    assert (folder / "train.bin").stat() == before
    shutil.rmtree(folder)
    _module(root).prepare_data()
    assert folder.is_dir()


def test_a_tokenizer_says_how_many_tokens_there_are(root: Path) -> None:
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["00000000", "01010101"], vocab_size=270, min_frequency=1)
    tokenizer.save(str(root.parent / "tokenizer.json"))
    module = _module(root, tokenizer=root.parent / "tokenizer.json", validation_fraction=0.0)
    module.prepare_data()
    module.setup("fit")
    assert module.vocab_size == tokenizer.get_vocab_size() > 256
    inputs, _ = module.train_dataloader().dataset[0]
    assert inputs.max() >= 256, "two digits in one token"
    text = "".join(path.read_text() for path in sorted(root.iterdir()))
    assert text.startswith(tokenizer.decode(inputs.tolist()))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sequence_length": 1000}, r"has 414 tokens for training, fewer than one sequence of 1000 .*length=413"),
        ({"sequence_length": 100}, r"has 18 tokens for validation, fewer than one sequence of 100 .*length=17"),
        ({"batch_size": 100}, r"has 51 training sequences of 8 tokens, .*batch_size=100 on each of 1 .*size=51"),
        ({"pattern": "*.md"}, r"texts has no file '\*.md'"),
    ],
)
def test_too_little_text_is_an_error_before_training(root: Path, arguments: dict[str, Any], words: str) -> None:
    record = _Record()
    with pytest.raises(CorpusError, match=words):
        _trainer(max_epochs=1).fit(record, datamodule=_module(root, **arguments))
    assert record.seen == []


def test_another_text_than_on_rank_0_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(max_epochs=1)
    monkeypatch.setattr(trainer.strategy, "broadcast", lambda digest: "0" * 64)  # what rank 0 of two would send
    with pytest.raises(CorpusError, match=r"rank 0 has another text than rank 0: .* not 000000000000"):
        trainer.fit(_Record(), datamodule=_module(root))


def test_a_rank_with_rank_0s_text_stops_with_those_that_have_another(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(max_epochs=1)
    monkeypatch.setattr(trainer.strategy, "reduce_boolean_decision", lambda same: False)  # what another rank says
    with pytest.raises(CorpusError, match="Other ranks have another text than rank 0"):
        trainer.fit(_Record(), datamodule=_module(root))


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence_length", 0), ("batch_size", 0), ("num_workers", -1), ("validation_fraction", 1.0)],
)
def test_arguments_are_checked_at_once(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}, but it must be"):
        TextDataModule("/somewhere", **{name: value})
