"""Text that is packed as tokens, and read as sequences: the same as from the text itself."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.data.packing import records, tree
from torch import Tensor

from azureml_strategy.data import CorpusError, TextDataModule, TokenSequences
from azureml_strategy.data.packing.pack import Packing, pack
from azureml_strategy.data.packing.tokens import RUN_BYTES, TokenizerChoice, find_text
from azureml_strategy.data.shard_index import RecordError, ShardIndex, ShardIndexError, check_record, load_index
from azureml_strategy.data.text import ShardedTokens
from azureml_strategy.data.tokens import find_corpus


class Reader:
    """Reads a packed folder, and counts what it was asked for."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.index: ShardIndex = load_index(self.folder / "index.npz")
        self.asked: list[int] = []
        self.told: list[Any] = []

    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        self.asked += numbers
        contents = []
        for number in numbers:
            with (self.folder / self.index.shards[self.index.shard[number]]).open("rb") as file:
                file.seek(int(self.index.offset[number]))
                contents.append(check_record(self.index, number, file.read(int(self.index.length[number]))))
        return contents

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        self.told += [numbers.tolist(), following.tolist()]

    def reached(self, position: int) -> None:
        self.told.append(position)

    def close(self) -> None:
        pass


def text(root: Path, documents: int = 12, words: int = 12_000) -> Path:
    rng = np.random.default_rng(0)
    root.mkdir()
    for number in range(documents):
        (root / f"{number:02}.txt").write_text(" ".join(map(str, rng.integers(0, 900, words + 100 * number))))
    return root


def tokenizer(path: Path) -> Path:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(n): n for n in range(900)} | {"<end>": 900}, "<end>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def pack_text(source: Path, out: Path, name: str | None = None, end: str | None = None, **options: Any) -> Path:
    fraction = options.pop("validation_fraction", 0.2)
    corpus = find_corpus(source, None, "*.txt", {})
    pack(Packing(find_text(corpus, TokenizerChoice(name, end), fraction), out, {"--text": True}, **options))
    return out


def both(tmp_path: Path, name: str | None = None, end: str | None = None, **settings: Any) -> list[TextDataModule]:
    source = text(tmp_path / "src")
    out = pack_text(source, tmp_path / "out", name, end, shard_size=200_000)
    common = {"tokenizer": name, "end_of_text": end, "validation_fraction": 0.2, **settings}
    modules = [TextDataModule(source, cache=tmp_path / "cache", **common), TextDataModule(out, **common)]
    for module in modules:
        module.prepare_data()
        module.setup("fit")
    return modules


@pytest.mark.parametrize(("length", "batch_size"), [(7, 100), (128, 2), (RUN_BYTES + 5, 2)])
def test_the_batches_are_those_of_the_text(tmp_path: Path, length: int, batch_size: int) -> None:
    compare(both(tmp_path, sequence_length=length, batch_size=batch_size))


def test_the_batches_are_those_of_the_text_by_a_tokenizer_in_workers(tmp_path: Path) -> None:
    name = str(tokenizer(tmp_path / "tokenizer.json"))
    modules = both(tmp_path, name, "<end>", sequence_length=50, num_workers=1)
    assert modules[0].vocab_size == modules[1].vocab_size == 901
    compare(modules)


def compare(modules: list[TextDataModule]) -> None:
    plain, packed = modules
    torch.manual_seed(0)
    for loader in ("train_dataloader", "val_dataloader"):
        expected, found = list(getattr(plain, loader)()), list(getattr(packed, loader)())
        assert len(expected) == len(found) > 0
        for batch, other in zip(expected, found, strict=True):
            assert all(torch.equal(one, two) for one, two in zip(batch, other, strict=True))


def test_records_are_runs_of_tokens_in_the_order_of_the_documents(tmp_path: Path) -> None:
    source = text(tmp_path / "src")
    out = pack_text(source, tmp_path / "out", shard_size=150_000)
    train, _ = find_corpus(source, None, "*.txt", {}).split(0.2)
    index = load_index(out / "train" / "index.npz")
    contents = [np.load(file) for file in map(as_file, records(out / "train", index))]
    assert np.concatenate(contents).tobytes() == b"".join(path.read_bytes() + b"\0" for path in train)
    assert {len(each) for each in contents[:-1]} == {RUN_BYTES} == {index.facts["run"]}
    assert {name: index.facts[name] for name in ("dtype", "tokens", "tokenizer", "vocab_size")} == {
        "dtype": "uint8",
        "tokens": sum(map(len, contents)),
        "tokenizer": "bytes",
        "vocab_size": 256,
    }
    assert (index.kind, index.classes, len(index.shards) > 1) == ("tokens", (), True)
    assert tree(pack_text(source, tmp_path / "again", shard_size=150_000)) == tree(out)


def as_file(content: bytes) -> Any:
    import io

    return io.BytesIO(content)


def test_documents_in_several_groups_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text(tmp_path / "src")
    out = pack_text(source, tmp_path / "out")
    monkeypatch.setattr("azureml_strategy.data.packing.tokens._GROUP_BYTES", 20_000)
    assert tree(pack_text(source, tmp_path / "groups")) == tree(out)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 200))
def test_any_sequence_of_any_length(length: int, run: int, tokens: int) -> None:
    stream = np.arange(tokens, dtype=np.uint16)
    sequences = ShardedTokens(InMemory(stream, run), length)
    assert len(sequences) == (tokens - 1) // length
    for number, (inputs, targets) in enumerate(sequences.__getitems__(range(len(sequences)))):
        assert inputs.tolist() == stream[number * length : (number + 1) * length].tolist()
        assert targets.tolist() == stream[number * length + 1 : (number + 1) * length + 1].tolist()


class InMemory:
    """A stream of tokens in records of a few."""

    def __init__(self, stream: NDArray[np.uint16], run: int) -> None:
        import io

        self.records = []
        for start in range(0, len(stream), run):
            file = io.BytesIO()
            np.save(file, stream[start : start + run])
            self.records.append(file.getvalue())
        count = len(self.records)
        zeros = np.zeros(count, np.int64)
        facts = {"dtype": "uint16", "tokens": len(stream), "run": run, "vocab_size": 1000}
        arrays = (
            zeros.astype(np.uint32),
            zeros,
            zeros.astype(np.uint32),
            zeros.astype(np.int32),
            zeros.astype(np.uint32),
        )
        self.index = ShardIndex("tokens", ("a.tar",), np.array([10**6]), *arrays, facts=facts)
        self.told: list[Any] = []
        self.asked: list[int] = []

    def read(self, numbers: Sequence[int]) -> list[bytes | Exception]:
        self.asked += numbers
        return [self.records[number] for number in numbers]

    def expect(self, numbers: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        self.told += [numbers.tolist(), following.tolist()]

    def reached(self, position: int) -> None:
        self.told.append(position)

    def close(self) -> None:
        pass


def test_the_sample_that_pads_is_that_of_token_sequences(tmp_path: Path) -> None:
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "a.bin")
    plain = TokenSequences(tmp_path / "a.bin", "uint16", 7)
    packed = ShardedTokens(InMemory(np.arange(50, dtype=np.uint16), 20), 7)
    assert len(plain) == len(packed)
    for one, two in zip(plain[len(plain)], packed[len(packed)], strict=True):
        assert torch.equal(one, two)


def test_a_record_of_a_batch_is_read_once_and_the_reader_is_told_records() -> None:
    reader = InMemory(np.arange(100, dtype=np.uint16), 20)
    sequences = ShardedTokens(reader, 15)
    sequences.__getitems__([0, 1, 0, len(sequences)])
    assert reader.asked == [0, 1]
    sequences.expect(np.array([1, 3, 0, len(sequences)]), np.array([2]))
    assert reader.told == [[0, 1, 2, 3, 0], [1, 2]]
    for position in (0, 1, 2, 3, 4):
        sequences.reached(position)
    assert reader.told[2:] == [0, 2, 4, 5, 5]


def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    out = pack_text(text(tmp_path / "src"), tmp_path / "out")
    reader = Reader(out / "train")
    shard = out / "train" / reader.index.shards[0]
    content = bytearray(shard.read_bytes())
    content[int(reader.index.offset[1]) + 5000] ^= 1
    shard.write_bytes(content)
    sequences: ShardedTokens = pickle.loads(pickle.dumps(ShardedTokens(reader, 1000)))
    assert isinstance(sequences[0][0], Tensor)
    with pytest.raises(RecordError, match=rf"train-000000.tar, byte {reader.index.offset[1]}: .* checksum"):
        sequences.__getitems__([0, 70])


def test_another_tokenizer_than_that_of_the_packed_text_is_refused(tmp_path: Path) -> None:
    name = str(tokenizer(tmp_path / "tokenizer.json"))
    out = pack_text(text(tmp_path / "src"), tmp_path / "out", name)
    module = TextDataModule(out, validation_fraction=0.2)
    module.setup("fit")
    assert module.vocab_size == 901, "without one it is that of the packed text"
    with pytest.raises(CorpusError, match=r"packed with another tokenizer: .* Leave data.tokenizer out"):
        TextDataModule(out, tokenizer=name, end_of_text="<end>").setup("fit")


def test_text_packed_without_validation(tmp_path: Path) -> None:
    out = pack_text(text(tmp_path / "src"), tmp_path / "out", validation_fraction=0)
    assert [path.name for path in out.iterdir()] == ["train"]
    with pytest.raises(CorpusError, match=r"packed without validation. Set data.validation_fraction=0"):
        TextDataModule(out).setup("fit")
    module = TextDataModule(out, validation_fraction=0)
    module.setup("fit")
    assert module.val_dataloader() == []


def test_images_are_no_tokens() -> None:
    reader = InMemory(np.arange(9, dtype=np.uint16), 4)
    reader.index = ShardIndex("images", *(getattr(reader.index, name) for name in ARRAYS))
    with pytest.raises(ShardIndexError, match=r"holds images, not tokens.*--text"):
        ShardedTokens(reader, 2)


ARRAYS = ("shards", "sizes", "shard", "offset", "length", "label", "checksum")
