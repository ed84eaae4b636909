"""Reads conversations from JSON lines, and turns them into tokens by the chat template of a model's tokenizer."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from azureml_strategy.data.tokens import Corpus, CorpusError

Learn = Literal["answers", "all"]
Message = dict[str, Any]
# Version of the files below. Another version gets another folder.
_VERSION = 2
_FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, '
    '{"prompt": "...", "completion": "..."} or {"text": "..."}'
)


@dataclass(frozen=True)
class Encoded:
    """A sample: tokens, and which of them a model is to learn, both of the same length."""

    tokens: NDArray[np.int64]
    learned: NDArray[np.bool_]


class ConversationEncoder:
    """Turns a line of JSON into tokens.

    Args:
        tokenizer: of transformers; conversations need its chat template.
        learn: `answers` learns what the assistant says; `all` learns every token. Answers with `"weight": 0` are not
            learned.
        name: of the tokenizer, for messages.

    Attributes:
        unread: how many lines had each key that does not change their tokens.
        unread_in_messages: how many messages had each key that does not change what the chat template writes.
    """

    def __init__(self, tokenizer: Any, learn: Learn, name: str) -> None:
        self._tokenizer, self._learn, self._name = tokenizer, learn, name
        self.unread: Counter[str] = Counter()
        self.unread_in_messages: Counter[str] = Counter()

    def identity(self) -> str:
        """Hash what the tokens depend on: all files of the tokenizer, as it saves itself, and what is learned."""
        digest = hashlib.sha256(repr((_VERSION, self._learn)).encode())
        with tempfile.TemporaryDirectory() as folder:
            self._tokenizer.save_pretrained(folder)
            for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
                content = path.read_bytes()
                digest.update(f"\0{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()

    def encode(self, line: str, place: str) -> Encoded:
        """Return the tokens of a line, one JSON object. `place` is its file and number, for messages.

        Raises:
            CorpusError: it is no JSON, of no known form, or not what the chat template takes.
        """
        try:
            sample = json.loads(line)
        except json.JSONDecodeError as error:
            raise CorpusError(f"{place} is no JSON: {error}. Each line is one object: {_FORMS}.") from error
        if not isinstance(sample, dict):
            raise CorpusError(f"{place} is a {type(sample).__name__}. Each line is one object: {_FORMS}.")
        parts = list(self._parts(sample, place))
        tokens = np.array([token for piece, _ in parts for token in piece], dtype=np.int64)
        learned = np.array([flag for piece, flag in parts for _ in piece], dtype=np.bool_)
        return Encoded(tokens, learned)

    def _parts(self, sample: Mapping[str, Any], place: str) -> Iterator[tuple[list[int], bool]]:
        """Yield consecutive tokens, and whether they are learned."""
        everything = self._learn == "all"
        if "messages" in sample:
            messages = _messages(sample["messages"], place)
            yield from self._turns(messages, place)
            self.unread.update(sample.keys() - {"messages"})
            self.unread_in_messages.update(self._unread_keys(messages, place))
        elif "prompt" in sample and "completion" in sample:
            yield self._plain(sample["prompt"], place, first=True), everything
            yield self._plain(sample["completion"], place), True
            yield self._end(), True
            self.unread.update(sample.keys() - {"prompt", "completion"})
        elif "text" in sample:
            yield self._plain(sample["text"], place, first=True), True
            yield self._end(), True
            self.unread.update(sample.keys() - {"text"})
        else:
            raise CorpusError(f"{place} has the keys {', '.join(sample) or 'none'}. A line is {_FORMS}.")

    def _turns(self, messages: Sequence[Message], place: str) -> Iterator[tuple[list[int], bool]]:
        """Yield the tokens up to each answer and those of the answer in turn, and whether they are learned."""
        done: list[int] = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                asked = self._applied(messages[:index], place, answer_follows=True)
                answered = self._applied(messages[: index + 1], place)
                if answered[: len(asked)] != asked or asked[: len(done)] != done:
                    raise CorpusError(
                        f"{place}: the chat template of {self._name} changes earlier turns when later ones follow, so "
                        "nobody can tell which tokens are the assistant's. Write data.learn=all, or give each line one "
                        "answer, at its end."
                    )
                yield asked[len(done) :], self._learn == "all"
                yield answered[len(asked) :], message.get("weight") != 0
                done = answered
        whole = self._applied(messages, place)
        yield whole[len(done) :], self._learn == "all"

    def _unread_keys(self, messages: Sequence[Message], place: str) -> Counter[str]:
        """Count the keys without which the chat template writes the same."""
        others = Counter(key for message in messages for key in _other_keys(message))
        if not others or self._have_no_effect(others.keys(), messages, place):
            return others
        return Counter({key: count for key, count in others.items() if self._have_no_effect({key}, messages, place)})

    def _have_no_effect(self, keys: Set[str], messages: Sequence[Message], place: str) -> bool:
        """Whether the chat template writes the same without these keys."""
        less = [
            {key: value for key, value in message.items() if key not in keys & _other_keys(message)}
            for message in messages
        ]
        try:
            return self._rendered(less, place) == self._rendered(messages, place)
        except CorpusError:  # the template needs them
            return False

    def _applied(self, messages: Sequence[Message], place: str, answer_follows: bool = False) -> list[int]:
        text = self._rendered(messages, place, answer_follows)
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _rendered(self, messages: Sequence[Message], place: str, answer_follows: bool = False) -> str:
        if self._tokenizer.chat_template is None:
            raise CorpusError(
                f"{place} is a conversation, but the tokenizer of {self._name} has no chat template. Take the "
                'instruction-tuned variant of the model, or write {"prompt": ..., "completion": ...} lines.'
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answer_follows
            )
        except Exception as error:  # jinja's errors, and what a template raises itself
            roles = ", ".join(message["role"] for message in messages)
            raise CorpusError(f"{place}: the chat template of {self._name} does not take {roles}: {error}") from error
        return text

    def _plain(self, text: object, place: str, first: bool = False) -> list[int]:
        if not isinstance(text, str):
            raise CorpusError(f"{place} has {type(text).__name__} where a text belongs. A line is {_FORMS}.")
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        start = self._tokenizer.bos_token_id
        return [start, *tokens] if first and start is not None else tokens

    def _end(self) -> list[int]:
        end = self._tokenizer.eos_token_id
        return [] if end is None else [end]


def encode_files(corpus: Corpus, encoder: ConversationEncoder) -> Iterator[tuple[str, Encoded]]:
    """Yield place and tokens of each sample of all files, line by line; blank lines are passed over.

    Raises:
        CorpusError: a line cannot be read.
    """
    for document in corpus.documents:
        with document.open(encoding="utf-8") as lines:
            for number, line in _numbered(lines, document):
                if line.strip():
                    place = f"{document}:{number}"
                    yield place, encoder.encode(line, place)


def _numbered(lines: Iterable[str], document: Path) -> Iterator[tuple[int, str]]:
    try:
        yield from enumerate(lines, 1)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{document} is not UTF-8: {error}. Convert it, or leave it out by data.pattern.") from error


def _other_keys(message: Message) -> set[str]:
    """Return the keys of a message that only a chat template could read."""
    # OpenAI's format marks by a weight of 0 which answers are not to be learned.
    return message.keys() - {"role", "content", *(["weight"] if message["role"] == "assistant" else [])}


def _messages(value: object, place: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise CorpusError(f"{place} has no list of messages. A line is {_FORMS}.")
    for message in value:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise CorpusError(f"{place} has a message without role or content: {str(message)[:80]}.")
        if message["role"] == "assistant" and message.get("weight") not in (None, 0, 1):
            raise CorpusError(
                f"{place} has an answer of weight {message['weight']!r}. Write 0, and it is not learned, or 1."
            )
    return value
