"""Conversations and other samples from JSON lines, for fine-tuning a language model."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from azureml_strategy.data.conversations import ConversationEncoder, Learn, encode_files
from azureml_strategy.data.folders import written_once
from azureml_strategy.data.skipped import PassedOver, first_names, warn
from azureml_strategy.data.text import TokenDataModule
from azureml_strategy.data.tokens import Corpus, CorpusError, find_corpus
from azureml_strategy.huggingface.sources import find_source
from azureml_strategy.interfaces import IGNORED_LABEL

Sample = dict[str, Tensor]
# Columns of rows are a multiple of this, so that kernels for 16-bit numbers have no remainders.
_MULTIPLE = 8
_ARRAYS = ("tokens", "learned", "starts")
_LEFT_OUT = "left_out.json"


class Conversations(Dataset[Sample]):
    """Samples in files of tokens, which are mapped and not read. A sample longer than `length` ends there.

    A sample is `input_ids` and `shift_labels`, int64 `(T,)` each: the label of a token is the next token if that is to
    be learned, and -100 otherwise. The index `len(self)` gives a sample of which nothing is learned.

    Args:
        folder: what `write_conversations` wrote.
        samples: numbers of those that belong to this data set.
        length: the most tokens of a sample.
    """

    def __init__(self, folder: Path, samples: Sequence[int], length: int) -> None:
        self._tokens, self._learned, self._starts = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS)
        self._samples, self._length = samples, length

    def __len__(self) -> int:
        return len(self._samples)

    @override
    def __getitem__(self, index: int) -> Sample:
        if index == len(self):
            return {"input_ids": torch.zeros(1, dtype=torch.int64), "shift_labels": torch.tensor([IGNORED_LABEL])}
        start, stop = (int(each) for each in self._starts[self._samples[index] : self._samples[index] + 2])
        stop = min(stop, start + self._length + 1)
        tokens = torch.from_numpy(self._tokens[start:stop].astype(np.int64))
        learned = torch.from_numpy(self._learned[start + 1 : stop].copy())
        return {"input_ids": tokens[:-1], "shift_labels": tokens[1:].masked_fill(~learned, IGNORED_LABEL)}


def collate(samples: Sequence[Sample]) -> Sample:
    """Join samples in rows as long as the longest, with a mask: `input_ids`, `attention_mask`, `shift_labels`."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    columns = -(-longest // _MULTIPLE) * _MULTIPLE
    batch = {
        "input_ids": torch.zeros(len(samples), columns, dtype=torch.int64),
        "attention_mask": torch.zeros(len(samples), columns, dtype=torch.int64),
        "shift_labels": torch.full((len(samples), columns), IGNORED_LABEL),
    }
    for row, sample in enumerate(samples):
        size = len(sample["input_ids"])
        batch["input_ids"][row, :size] = sample["input_ids"]
        batch["shift_labels"][row, :size] = sample["shift_labels"]
        batch["attention_mask"][row, :size] = 1
    return batch


def write_conversations(folder: Path, corpus: Corpus, encoder: ConversationEncoder) -> None:
    """Write all samples with something to learn, all or nothing, as `written_once` does.

    Sentences about what is left out are written beside them, so that each run warns of it, not only this one.

    Raises:
        CorpusError: a line cannot be read, or nothing is to be learned.
    """
    if folder.is_dir():
        return
    samples, others = [], PassedOver()
    for place, sample in encode_files(corpus, encoder):
        if sample.learned[1:].any():
            samples.append(sample)
        else:
            others.add(place)
    if len(samples) < 2:
        raise CorpusError(f"{corpus.root} has {len(samples)} sample(s) with something to learn. At least 2 are needed.")
    starts = np.cumsum([0, *(len(each.tokens) for each in samples)])
    tokens = np.concatenate([each.tokens for each in samples]).astype(np.uint32)
    learned = np.concatenate([each.learned for each in samples])
    with written_once(folder, ".samples-") as written:
        if written is None:
            return
        written.mkdir()
        for name, array in zip(_ARRAYS, (tokens, learned, starts), strict=True):
            np.save(written / f"{name}.npy", array)
        (written / _LEFT_OUT).write_text(json.dumps(_left_out(corpus, len(samples), others, encoder)))


def _left_out(corpus: Corpus, samples: int, others: PassedOver, encoder: ConversationEncoder) -> list[str]:
    """Return sentences that say which lines and keys are not learned from."""
    found = []
    if others:
        found.append(
            f"{corpus.root}: {samples:,} samples are read, and {others.count:,} others are passed over, as nothing in "
            f"them is to be learned: {others}. A sample needs an answer of the assistant, a completion that is not "
            "empty, or data.learn=all."
        )
    if encoder.unread:
        keys = first_names([f"{key} ({lines:,} lines)" for key, lines in encoder.unread.most_common()])
        found.append(
            f"{corpus.root}: {len(encoder.unread)} keys of the lines are not read: {keys}. Write what the model is to "
            "see into messages, prompt, completion or text."
        )
    if encoder.unread_in_messages:
        keys = first_names([f"{key} ({count:,} messages)" for key, count in encoder.unread_in_messages.most_common()])
        found.append(
            f"{corpus.root}: {len(encoder.unread_in_messages)} keys of the messages are not read by the chat template: "
            f"{keys}. Write what the model is to see into content, or take a tokenizer whose chat template reads them; "
            'an answer that is not to be learned has "weight": 0.'
        )
    return found


def _warn_of_cut_samples(folder: Path, length: int) -> None:
    """Warn of samples that are cut off at `length` tokens, and of those that have nothing left to learn."""
    starts = np.load(folder / "starts.npy", mmap_mode="r")
    learned = np.load(folder / "learned.npy", mmap_mode="r")
    sizes = np.diff(starts) - 1  # the last token is a label only
    cut = np.flatnonzero(sizes > length)
    if not len(cut):
        return
    lost = int((sizes[cut] - length).sum())
    nothing = sum(not learned[starts[each] + 1 : starts[each] + length + 1].any() for each in cut)
    warn(
        f"{len(cut):,} of {len(sizes):,} samples are longer than data.sequence_length={length} and end there: {lost:,} "
        f"of {int(sizes.sum()):,} tokens are left out, and {nothing:,} samples have nothing left to learn. The longest "
        f"needs data.sequence_length={int(sizes.max())}."
    )


class ChatDataModule(TokenDataModule):
    """Conversations from JSON lines, by the chat template of a model's tokenizer.

    A line is `{"messages": [{"role": ..., "content": ...}, ...]}`, `{"prompt": ..., "completion": ...}` or
    `{"text": ...}`. Batches are dictionaries of int64 `(N, T)`: `input_ids`, `attention_mask` and `shift_labels`, as
    `FineTuner` takes them; T is that of the longest sample. One process of each node makes the tokens once.

    Args:
        tokenizer: a folder of a model with its tokenizer, an id of the Hugging Face hub, or `azureml:NAME:VERSION`.
        root: a folder of JSON lines, or one file.
        input_name: instead of `root`, the name of an input of the Azure ML job.
        pattern: which files below the folder are read.
        learn: `answers` learns what the assistant says and completions; `all` learns every token. Answers with
            `"weight": 0` are not learned.
        sequence_length: the most tokens of a sample; longer ones end there.
        batch_size: samples per step and process.
        num_workers: reading processes per dataloader.
        validation_fraction: share of the samples for validation; 0 for no validation.
        cache: folder where the tokens are kept, also for later runs.

    Raises:
        ValueError: an argument is out of range.
        CorpusError: in `prepare_data` and `setup`, a line cannot be read, or there are too few.
        PretrainedModelError: there is no such tokenizer.
    """

    def __init__(
        self,
        tokenizer: str,
        root: str | os.PathLike[str] | None = None,
        input_name: str | None = None,
        pattern: str = "*.jsonl",
        learn: Learn = "answers",
        sequence_length: int = 1024,
        batch_size: int = 4,
        num_workers: int = 0,
        validation_fraction: float = 0.05,
        cache: str | os.PathLike[str] = "~/.cache/azureml_strategy/chat",
    ) -> None:
        shared = (root, input_name, pattern, sequence_length, batch_size, num_workers, validation_fraction, cache)
        super().__init__("samples", *shared)
        if learn not in ("answers", "all"):
            raise ValueError(f"learn={learn!r} is unknown. Write 'answers' or 'all'.")
        if (root is None) == (input_name is None):
            raise CorpusError("Name the JSON lines: data.root=FILE_OR_FOLDER, or data.input_name=INPUT_OF_THE_JOB.")
        self.tokenizer, self.learn = tokenizer, learn
        self._folder: Path | None = None
        self._parts: dict[str, Sequence[int]] = {}

    @override
    def prepare_data(self) -> None:
        """Make the tokens unless they exist."""
        self._locate(write=True)

    @override
    def setup(self, stage: str) -> None:
        """Open the tokens.

        Raises:
            CorpusError: the tokens are missing, or too few for the batches of all replicas.
        """
        if self._folder is None:
            self._folder = self._locate(write=False)
            count = len(np.load(self._folder / "starts.npy", mmap_mode="r")) - 1
            # Split in the same way at every call.
            order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()
            held = max(1, round(count * self.validation_fraction)) if self.validation_fraction else 0
            self._parts = {"train": sorted(order[held:]), "val": sorted(order[:held])}
            _warn_of_cut_samples(self._folder, self.sequence_length)

    def _locate(self, write: bool) -> Path:
        from transformers import AutoTokenizer

        corpus = find_corpus(self.root, self.input_name, self.pattern, os.environ)
        tokenizer: Any = AutoTokenizer.from_pretrained(find_source(self.tokenizer).folder)
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        encoder = ConversationEncoder(tokenizer, self.learn, self.tokenizer)
        folder = self.cache / f"{corpus.identity()[:12]}-{encoder.identity()[:12]}"
        if write:
            corpus.warn_of_others(self.pattern)
            write_conversations(folder, corpus, encoder)
            if (folder / _LEFT_OUT).is_file():  # an earlier version has written none
                for text in json.loads((folder / _LEFT_OUT).read_text()):
                    warn(text)
        elif not folder.is_dir():
            raise CorpusError(
                f"{folder} holds no tokens, which one process of each node writes in prepare_data: it failed, or the "
                "files were changed since. Look at the log of this node's first process."
            )
        return folder

    @override
    def _samples(self, part: str) -> Conversations:
        assert self._folder is not None, "setup() opens the tokens"
        return Conversations(self._folder, self._parts[part], self.sequence_length)

    @override
    def _too_few(self, samples: int, replicas: int) -> str:
        return (
            f"There are {samples} training samples, fewer than a batch of {self.batch_size} on each of "
            f"{replicas} replicas. Set data.batch_size={max(samples // replicas, 1)} or less, or give more."
        )

    @override
    def _loader_options(self) -> dict[str, Any]:
        return {**super()._loader_options(), "collate_fn": collate, "timeout": 0}  # the tokens are on a local disk
