from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from azureml_strategy.data import (
    CorpusError,
    ResumableLoader,
    SequenceSampler,
    TextDataModule,
    TokenSequences,
    count_tokens,
)


def order(
    samples: int, replicas: int, rank: int, seed: int = 0, epoch: int = 0, resume_at: tuple[int, int] = (0, 0)
) -> list[int]:
    sampler = SequenceSampler(range(samples), replicas, rank, seed)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    sampler.resume_at = resume_at
    return list(sampler)


def global_batches(samples: int, replicas: int, batch: int, **state: int) -> list[set[int]]:
    """What all replicas read in each step, with a global batch of `batch`."""
    share = batch // replicas
    orders = [order(samples, replicas, rank, **state) for rank in range(replicas)]
    steps = len(orders[0]) // share
    return [{index for own in orders for index in own[step * share : (step + 1) * share]} for step in range(steps)]


@given(st.integers(0, 200), st.integers(0, 2**40), st.integers(0, 5))
def test_global_batches_are_equal_for_any_number_of_replicas(samples: int, seed: int, epoch: int) -> None:
    expected = global_batches(samples, 1, 8, seed=seed, epoch=epoch)
    assert len(expected) == samples // 8
    assert all(len(batch) == 8 for batch in expected)
    assert len(set().union(*expected)) == 8 * len(expected), "no sample twice"
    for replicas in (2, 4):
        assert global_batches(samples, replicas, 8, seed=seed, epoch=epoch) == expected


def test_within_a_global_batch_replicas_take_turns() -> None:
    whole = order(64, 1, 0)
    for rank in range(4):
        assert order(64, 4, rank) == whole[rank::4]


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {(seed, epoch): tuple(order(50, 1, 0, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4, "torch's own sampler takes the sum of both"
    assert order(50, 1, 0, 1, 1) == list(orders[1, 1])


@given(st.integers(1, 200), st.integers(1, 4), st.integers(1, 4), st.integers(0, 200))
def test_an_epoch_goes_on_at_any_sample_with_any_number_of_replicas(
    samples: int, before: int, after: int, read: int
) -> None:
    read = min(read, samples) // before * before
    first = [index for place in range(read // before) for index in _turn(samples, before, place)]
    rest = [order(samples, after, rank, epoch=3, resume_at=(3, read)) for rank in range(after)]
    assert len({len(share) for share in rest}) == 1
    joined = first + [index for turn in zip(*rest, strict=True) for index in turn]
    whole = order(samples, 1, 0, epoch=3)
    assert joined == whole[: len(joined)]
    assert samples - len(joined) < after
    assert order(samples, after, 0, epoch=4, resume_at=(3, read)) == order(samples, after, 0, epoch=4)


def _turn(samples: int, replicas: int, place: int) -> list[int]:
    return [order(samples, replicas, rank, epoch=3)[place] for rank in range(replicas)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_says_what_it_gave_and_goes_on_there(tmp_path: Path, workers: int) -> None:
    np.arange(1001, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    sequences = TokenSequences(tmp_path / "tokens.bin", "uint16", 10)

    def loader(replicas: int, batch_size: int) -> ResumableLoader:
        sampler = SequenceSampler(sequences, replicas, 0, seed=5)
        return ResumableLoader(sequences, batch_size=batch_size, sampler=sampler, num_workers=workers)

    whole = [batch[0][:, 0].tolist() for batch in loader(1, 4)]
    assert len(whole) == 25
    first = loader(2, 2)
    batches = iter(first)
    for _ in range(7):
        next(batches)
    assert first.state_dict()["samples"] == 7 * 2 * 2
    second = loader(1, 4)
    second.load_state_dict(first.state_dict())
    assert [batch[0][:, 0].tolist() for batch in second] == whole[7:]
    assert second.state_dict()["samples"] == 100


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "tokens.bin"


@given(tokens=st.integers(2, 300), length=st.integers(1, 40), dtype=st.sampled_from(["uint8", "uint16", "uint32"]))
def test_every_token_but_a_tail_is_learned_from_once(path: Path, tokens: int, length: int, dtype: str) -> None:
    values = np.arange(tokens).astype(dtype)
    values.tofile(path)
    sequences = TokenSequences(path, dtype, length)
    assert len(sequences) == (tokens - 1) // length
    samples = [sequences[index] for index in range(len(sequences))]
    inputs = torch.cat([sample[0] for sample in samples] or [torch.empty(0, dtype=torch.int64)])
    targets = torch.cat([sample[1] for sample in samples] or [torch.empty(0, dtype=torch.int64)])
    used = len(sequences) * length
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == values[:used].tolist()
    assert targets.tolist() == values[1 : used + 1].tolist()


def test_padding_counts_nowhere(path: Path) -> None:
    np.zeros(21, dtype=np.uint16).tofile(path)
    inputs, targets = TokenSequences(path, "uint16", 10)[2]
    assert inputs.shape == (10,)
    assert targets.tolist() == [-100] * 10


def test_a_worker_gets_the_path_and_not_the_tokens(path: Path) -> None:
    np.arange(100_000, dtype=np.uint32).tofile(path)
    sequences = TokenSequences(path, "uint32", 10)
    sent = pickle.dumps(sequences)
    assert len(sent) < 1000
    assert pickle.loads(sent)[7][0].tolist() == sequences[7][0].tolist() == list(range(70, 80))


def test_tokens_of_a_batch_are_counted() -> None:
    assert count_tokens((torch.zeros(8, 128), torch.zeros(8, 128))) == 1024


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
