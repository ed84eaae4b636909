"""Sequences of tokens for training and validation: from texts or a packed set, as a data set, a sampler and a data
module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from azureml_strategy.data.folders import resolve_place
from azureml_strategy.data.sampler import (
    EvaluationSampler,
    PlannedLoader,
    ResumableLoader,
    ResumableSampler,
    global_seed,
    loader_options,
    rank_0_if_different,
    replica,
    require,
)
from azureml_strategy.data.shard_index import INDEX_NAME, ShardIndexError
from azureml_strategy.data.tokens import (
    CorpusError,
    TokenFiles,
    find_corpus,
    make_tokenizer,
    map_tokens,
    read_manifest,
    token_folder,
    write_tokens,
)
from azureml_strategy.interfaces import IGNORED_LABEL

if TYPE_CHECKING:
    from azureml_strategy.data.readers import ShardReader


class ShardedTokens(Dataset[tuple[Tensor, Tensor]]):
    """All sequences of a packed text, side by side: the samples of `TokenSequences`, by the same numbers.

    Args:
        reader: of the packed set.
        length: tokens per sequence.

    Raises:
        ShardIndexError: the set holds something else than tokens, or not all of them.
    """

    def __init__(self, reader: ShardReader, length: int) -> None:
        index = reader.index
        if index.kind != "tokens":
            raise ShardIndexError(f"This set holds {index.kind}, not tokens. Pack text: data pack SRC OUT --text")
        self.reader = reader
        self._length = length
        self._tokens = int(index.facts["tokens"])
        self._run = int(index.facts["run"])
        self._dtype = np.dtype(index.facts["dtype"])
        if len(index) != -(-self._tokens // self._run):
            raise ShardIndexError(
                f"The index has {len(index)} runs of {self._run} tokens, and there are {self._tokens} tokens: some are "
                "missing. Pack the text anew."
            )
        self._ends = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return (self._tokens - 1) // self._length

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Return the sequences of a batch. A record that several of them need is read once.

        Raises:
            OSError: a record is damaged or cannot be read. No other text can stand in for it.
        """
        needed = sorted({number for index in indices if index < len(self) for number in self._records(index)})
        records = {}
        for number, content in zip(needed, self.reader.read(needed), strict=True):
            if isinstance(content, Exception):
                raise content
            # numpy's format 1.0: ten bytes, whose last two are the length of a header, then the header and the tokens
            records[number] = np.frombuffer(content, self._dtype, offset=10 + int.from_bytes(content[8:10], "little"))
        return [self._sequence(index, records) for index in indices]

    def expect(self, sequences: NDArray[np.int64], following: NDArray[np.int64]) -> None:
        """Tell the reader which sequences will be read: in this pass through the data, and in the next one."""
        numbers, self._ends = self._expand(sequences)
        self.reader.expect(numbers, self._expand(following)[0])

    def reached(self, position: int) -> None:
        """Tell the reader how many sequences of the pass have been handed out."""
        known = min(position, len(self._ends))  # padding, at the end of a pass, is not read
        self.reader.reached(int(self._ends[known - 1]) if known else 0)

    def _records(self, index: int) -> range:
        start = index * self._length
        return range(start // self._run, (start + self._length) // self._run + 1)

    def _expand(self, sequences: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the records of all sequences in a row, and how many of them come up to the end of each sequence."""
        starts = sequences[sequences < len(self)] * self._length
        first, last = starts // self._run, (starts + self._length) // self._run
        counts = last - first + 1
        ends = np.cumsum(counts)
        within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
        return np.repeat(first, counts) + within, ends

    def _sequence(self, index: int, records: Mapping[int, NDArray[Any]]) -> tuple[Tensor, Tensor]:
        if index == len(self):
            return _padding(self._length)
        numbers = self._records(index)
        joined = np.concatenate([records[number] for number in numbers]) if len(numbers) > 1 else records[numbers[0]]
        return _sample(joined, index * self._length - numbers[0] * self._run, self._length)


@dataclass(frozen=True)
class PackedText:
    """A packed text, as `TokenFiles` is a text that was converted on this node."""

    readers: Mapping[str, ShardReader]  # of `train`, and of `val` if there is validation

    def count(self, part: str) -> int:
        """Return the number of tokens for `train` or `val`."""
        return int(self.readers[part].index.facts["tokens"]) if part in self.readers else 0

    @property
    def digest(self) -> str:
        """Hash of everything, equal on nodes that read the same set."""
        return "-".join(reader.index.digest for reader in self.readers.values())


class SequenceSampler(ResumableSampler):
    """Deals out the sequences of a text. It mixes seed and epoch, so no order recurs under another seed."""

    @override
    def order(self) -> Tensor:
        # torch's own rule, seed + epoch, would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
        mixed = int(np.random.SeedSequence([self.seed, self.epoch]).generate_state(1)[0])
        return torch.randperm(self._samples, generator=torch.Generator().manual_seed(mixed))


class TokenSequences(Dataset[tuple[Tensor, Tensor]]):
    """All sequences of a file of tokens, side by side. A tail shorter than a sequence is left out.

    A sample is `(inputs, targets)`, int64 `(length,)` each: the target of a token is the next token. The index
    `len(self)` gives a sample whose targets are all -100, which samplers use to make the shares of the ranks equal.

    Args:
        path: the file, which is mapped and not read.
        dtype: of its tokens, numpy's name.
        length: tokens per sequence.
    """

    def __init__(self, path: Path, dtype: str, length: int) -> None:
        self._arguments = (path, dtype, length)
        self._length = length
        self._tokens = map_tokens(path, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process that is not forked maps the file itself. numpy would send it the whole content.
        return (TokenSequences, self._arguments)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == len(self):
            return _padding(self._length)
        return _sample(self._tokens, index * self._length, self._length)


def _sample(tokens: NDArray[Any], start: int, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 `(length,)` each: the target of a token is the next token."""
    part = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
    return part[:-1], part[1:]


def _padding(length: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(length, dtype=torch.int64), torch.full((length,), IGNORED_LABEL)


def count_tokens(batch: tuple[Tensor, Tensor] | Mapping[str, Tensor]) -> int:
    """Return the number of tokens of a batch, for `ThroughputCallback(batch_size=..., unit="tokens")`.

    Padding counts: to leave it out would wait for the GPU at every step.
    """
    return batch["input_ids"].numel() if isinstance(batch, Mapping) else batch[0].numel()


class TokenDataModule(LightningDataModule):
    """What the data modules of text and of conversations have in common. `noun` is the plural of a sample's name."""

    def __init__(
        self,
        noun: str,
        root: str | os.PathLike[str] | None,
        input_name: str | None,
        pattern: str,
        sequence_length: int,
        batch_size: int,
        num_workers: int,
        validation_fraction: float,
        cache: str | os.PathLike[str],
    ) -> None:
        super().__init__()
        require("sequence_length", sequence_length, sequence_length >= 1, "1 or more tokens")
        require("batch_size", batch_size, batch_size >= 1, f"1 or more: {noun} a step and process")
        require("num_workers", num_workers, num_workers >= 0, "0 or more")
        rule = "from 0 to less than 1"
        require("validation_fraction", validation_fraction, 0 <= validation_fraction < 1, rule)
        self.root, self.input_name, self.pattern = root, input_name, pattern
        self.sequence_length, self.batch_size, self.num_workers = sequence_length, batch_size, num_workers
        self.validation_fraction = validation_fraction
        self.cache = Path(cache).expanduser()
        self.vocab_size: int | None = None

    @override
    def train_dataloader(self) -> ResumableLoader:
        """Return shuffled batches, all of the full size.

        Raises:
            CorpusError: there are fewer samples than one batch on each replica.
        """
        samples = self._samples("train")
        replicas, rank = replica(self.trainer)
        if len(samples) < self.batch_size * replicas:
            raise CorpusError(self._too_few(len(samples), replicas))
        sampler = SequenceSampler(samples, replicas, rank, global_seed())
        return ResumableLoader(samples, sampler=sampler, **self._loader_options())

    @override
    def val_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return every validation sample once, in order; nothing if `validation_fraction` is 0."""
        if not self.validation_fraction:
            return []
        samples = self._samples("val")
        return PlannedLoader(
            samples, sampler=EvaluationSampler(samples, *replica(self.trainer)), **self._loader_options()
        )

    @override
    def test_dataloader(self) -> DataLoader[Any] | list[Any]:
        """Return the same as for validation."""
        return self.val_dataloader()

    def _samples(self, part: str) -> Any:
        """Return the data set of `train` or `val`."""
        raise NotImplementedError

    def _too_few(self, samples: int, replicas: int) -> str:
        """Say that the training samples are fewer than one batch on each replica."""
        raise NotImplementedError

    def _loader_options(self) -> dict[str, Any]:
        return loader_options(self.trainer, self.batch_size, self.num_workers)


class TextDataModule(TokenDataModule):
    """Sequences of tokens from text files, by default the source of Python's standard library on this machine.

    Batches are `(inputs, targets)`, int64 `(batch_size, sequence_length)` each: the target of a token is the next
    token, and no metric may count a target of -100. One process of each node converts the text to tokens once. Then all
    processes map them into memory.

    Training sequences are shuffled by epoch and `seed_everything`'s seed, the same for any number of replicas.
    Validation has its own documents, which are the test set as well. Exactly one replica reads each of their sequences.

    Args:
        root: a folder of text, or one file; or a text that `azureml-strategy data pack --text` has packed: its folder,
            or its address, `az://container/path` for example. A packed text gives the same batches.
        input_name: instead of `root`, the name of an input of the Azure ML job, mounted or downloaded.
        pattern: which files below the folder are documents.
        tokenizer: a `tokenizer.json` of the `tokenizers` library, or the folder or hub id of a model that has one; None
            reads bytes, 256 tokens.
        end_of_text: the tokenizer's token that follows each document, such as `<|endoftext|>`; None for none. Documents
            read as bytes are followed by byte 0.
        sequence_length: tokens per sequence.
        batch_size: sequences per step and process.
        num_workers: reading processes per dataloader. 0 reads in the training process, which costs less than
            transferring such small samples between processes.
        validation_fraction: share of the documents for validation; 0 for no validation. That of a packed text was
            chosen when it was packed.
        cache: folder where the tokens are kept, also for later runs, and what was read of a packed text in Blob
            Storage.

    Raises:
        ValueError: an argument is out of range.
        CorpusError: in `prepare_data` and `setup`, there is too little text, or it cannot be read.
        DataFolderError: in `prepare_data`, the job has no input of that name.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        input_name: str | None = None,
        pattern: str = "*.txt",
        tokenizer: str | os.PathLike[str] | None = None,
        end_of_text: str | None = None,
        sequence_length: int = 128,
        batch_size: int = 8,
        num_workers: int = 0,
        validation_fraction: float = 0.05,
        cache: str | os.PathLike[str] = "~/.cache/azureml_strategy/text",
    ) -> None:
        shared = (root, input_name, pattern, sequence_length, batch_size, num_workers, validation_fraction, cache)
        super().__init__("sequences", *shared)
        self.tokenizer = tokenizer
        self.end_of_text = end_of_text
        self._files: TokenFiles | PackedText | None = None

    @override
    def prepare_data(self) -> None:
        """Write the tokens unless they exist, or were packed."""
        if self._packed() is None:
            self._locate(write=True)

    @override
    def setup(self, stage: str) -> None:
        """Open the tokens.

        Raises:
            CorpusError: there are too few tokens for one sequence, or they differ from those of rank 0.
        """
        if self._files is None:
            packed = self._packed()
            files = self._files = read_manifest(self._locate(write=False)) if packed is None else self._open(packed)
            needed = self.sequence_length + 1
            validation = files.count("val") if self.validation_fraction else needed
            for purpose, tokens in (("training", files.count("train")), ("validation", validation)):
                if tokens < needed:
                    raise CorpusError(
                        f"The text has {tokens} tokens for {purpose}, fewer than one sequence of "
                        f"{self.sequence_length} and the token after it. Set data.sequence_length={max(tokens - 1, 1)} "
                        "or less, give more text, or change data.validation_fraction."
                    )
            self._check_same_everywhere(files)

    @override
    def teardown(self, stage: str) -> None:
        """Close the files of a packed text, and the connection to the node's cache."""
        if isinstance(self._files, PackedText):
            for reader in self._files.readers.values():
                reader.close()

    def open_reader(self, address: str) -> ShardReader:
        """Open a packed set: a folder, or an address in Blob Storage, which is kept in `cache` as it is read."""
        from azureml_strategy.data.readers import choose_cache, open_reader
        from azureml_strategy.data.storage import is_remote

        return open_reader(address, choose_cache(self.cache / "shards", None) if is_remote(address) else None)

    def _packed(self) -> str | None:
        """Return the folder or address of a packed text; None for a text that has to be converted."""
        from azureml_strategy.data.storage import is_remote

        if self.root is None and self.input_name is None:
            return None
        if self.root is not None and is_remote(os.fspath(self.root)):
            return os.fspath(self.root).rstrip("/")
        folder = Path(resolve_place(self.root, self.input_name, os.environ)).expanduser()
        return str(folder) if (folder / "train" / INDEX_NAME).is_file() else None

    def _open(self, packed: str) -> PackedText:
        readers = {"train": self.open_reader(f"{packed}/train")}
        facts = readers["train"].index.facts
        if self.validation_fraction:
            if not facts.get("validation_fraction"):
                raise CorpusError(
                    f"{packed} was packed without validation. Set data.validation_fraction=0, or pack the text with "
                    f"--validation-fraction {self.validation_fraction}."
                )
            readers["val"] = self.open_reader(f"{packed}/val")
        if self.tokenizer is not None:
            given = make_tokenizer(self.tokenizer, self.end_of_text).identity
            if facts["tokenizer"] != given:
                raise CorpusError(
                    f"The text was packed with another tokenizer: its hash is {facts['tokenizer'][:12]}, and that of "
                    f"data.tokenizer (with data.end_of_text) is {given[:12]}. Leave data.tokenizer out, or pack the "
                    "text with this one."
                )
        self.vocab_size = int(facts["vocab_size"])
        return PackedText(readers)

    def _locate(self, write: bool) -> Path:
        corpus = find_corpus(self.root, self.input_name, self.pattern, os.environ)
        tokenizer = make_tokenizer(self.tokenizer, self.end_of_text)
        self.vocab_size = tokenizer.vocab_size
        folder = token_folder(self.cache, corpus, tokenizer, self.validation_fraction)
        if write:
            if self.root is not None or self.input_name is not None:  # the standard library is as it is
                corpus.warn_of_others(self.pattern)
            write_tokens(folder, corpus, tokenizer, self.validation_fraction)
        return folder

    @override
    def _samples(self, part: str) -> TokenSequences | ShardedTokens:
        assert self._files is not None, "setup() opens the tokens"
        if isinstance(self._files, PackedText):
            return ShardedTokens(self._files.readers[part], self.sequence_length)
        return TokenSequences(self._files.path(part), self._files.dtype, self.sequence_length)

    @override
    def _too_few(self, samples: int, replicas: int) -> str:
        return (
            f"The text has {samples} training sequences of {self.sequence_length} tokens, fewer than one "
            f"global batch: batch_size={self.batch_size} on each of {replicas} replicas. Set "
            f"data.batch_size={samples // replicas} or less, or use fewer processes."
        )

    def _check_same_everywhere(self, files: TokenFiles | PackedText) -> None:
        if self.trainer is None or (first := rank_0_if_different(self.trainer, files.digest)) is None:
            return
        if first == files.digest:  # this rank's text is right, but it would wait for the others
            raise CorpusError("Other ranks have another text than rank 0; what to do stands in their logs.")
        raise CorpusError(
            f"Global rank {self.trainer.global_rank} has another text than rank 0: the hash of its tokens is "
            f"{files.digest[:12]}, not {first[:12]}. Give all nodes the same files, or one folder that all of "
            "them mount: data.root=..."
        )
