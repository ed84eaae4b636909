"""Conversations from JSON lines: what is learned, how rows are joined, and what is said of bad lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_model import make_tokenizer
from transformers import AutoTokenizer

from azureml_strategy.data import ChatDataModule, CorpusError
from azureml_strategy.data.chat import collate
from azureml_strategy.data.conversations import ConversationEncoder

ASK, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def learned_text(line: Any, learn: Any = "answers", tokenizer: Any = None) -> tuple[str, str]:
    tokenizer = tokenizer or make_tokenizer()
    text = line if isinstance(line, str) else json.dumps(line)
    encoded = ConversationEncoder(tokenizer, learn, "tiny").encode(text, "file:1")
    return tokenizer.decode(encoded.tokens), tokenizer.decode(encoded.tokens[encoded.learned])


def test_of_a_conversation_the_answers_are_learned() -> None:
    whole, learned = learned_text({"messages": [ASK, ANSWER, ASK, {"role": "assistant", "content": "four"}]})
    assert whole == "<|user|>2+2?<|end|><|assistant|>4<|end|><|user|>2+2?<|end|><|assistant|>four<|end|>"
    assert learned == "4<|end|>four<|end|>"
    assert learned_text({"messages": [ASK, ANSWER]}, "all")[1] == "<|user|>2+2?<|end|><|assistant|>4<|end|>"


def test_an_answer_of_weight_0_is_seen_and_not_learned() -> None:
    bad, good = {"role": "assistant", "content": "5", "weight": 0}, {**ANSWER, "weight": 1}
    line = {"messages": [ASK, bad, ASK, good]}
    whole = "<|user|>2+2?<|end|><|assistant|>5<|end|><|user|>2+2?<|end|><|assistant|>4<|end|>"
    assert learned_text(line) == (whole, "4<|end|>")
    assert learned_text(line, "all")[1] == whole.replace("5<|end|>", "")


TOOLS = "{% if message.get('tool_calls') and 'name' in message %}{{ message.tool_calls }}{% endif %}"
ALL = "{{ message | tojson }}"


@pytest.mark.parametrize(
    ("reading", "unread"),
    [
        ("", {"name": 2, "tool_calls": 1, "weight": 1, "train": 1}),
        (TOOLS, {"weight": 1, "train": 1}),
        (ALL, {}),
    ],
)
def test_keys_of_messages_that_a_template_does_not_read_are_counted(reading: str, unread: dict[str, int]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("{% endfor %}", reading + "{% endfor %}", 1)
    encoder = ConversationEncoder(tokenizer, "answers", "tiny")
    asked = {**ASK, "name": "Ada", "weight": 0}
    answered = {**ANSWER, "name": "Bob", "tool_calls": ["add"], "train": False, "weight": 1}
    encoded = encoder.encode(json.dumps({"messages": [asked, answered]}), "file:1")
    assert encoder.unread_in_messages == unread
    assert ("add" in tokenizer.decode(encoded.tokens)) == bool(reading)
    assert not encoder.unread


def test_of_a_prompt_the_completion_is_learned_and_of_a_text_all() -> None:
    assert learned_text({"prompt": "2+2=", "completion": "4"}) == ("2+2=4<|end|>", "4<|end|>")
    assert learned_text({"text": "two"}) == ("two<|end|>", "two<|end|>")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "file:1 is no JSON"),
        ("[1]", "file:1 is a list"),
        ({"question": 1}, "file:1 has the keys question"),
        ({"messages": []}, "file:1 has no list of messages"),
        ({"messages": [{"role": "user"}]}, "file:1 has a message without role or content"),
        ({"messages": [ASK, {**ANSWER, "weight": 0.5}]}, r"file:1 has an answer of weight 0\.5\. Write 0"),
        ({"text": 3}, "file:1 has int where a text belongs"),
    ],
)
def test_a_bad_line_is_named(line: Any, words: str) -> None:
    with pytest.raises(CorpusError, match=words):
        learned_text(line)


def test_a_template_that_cannot_serve_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CorpusError, match=r"the chat template of tiny does not take user.*roles must alternate"):
        learned_text({"messages": [ASK, ANSWER]}, tokenizer=tokenizer)
    tokenizer.chat_template = "{{ messages | length }}{% if add_generation_prompt %}:{% endif %}"
    with pytest.raises(CorpusError, match="changes earlier turns when later ones follow"):
        learned_text({"messages": [ASK, ANSWER]}, tokenizer=tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match="the tokenizer of tiny has no chat template"):
        learned_text({"messages": [ASK, ANSWER]}, tokenizer=tokenizer)


@pytest.fixture
def data(tmp_path: Path) -> ChatDataModule:
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    lines = [json.dumps({"prompt": "a" * number, "completion": "b" * number}) for number in range(1, 21)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, "", ""]))
    return ChatDataModule(
        str(tmp_path / "model"),
        tmp_path / "rows.jsonl",
        sequence_length=16,
        batch_size=3,
        validation_fraction=0.2,
        cache=tmp_path / "cache",
    )


def test_batches_are_rows_with_a_mask_and_the_label_of_each_next_token(data: ChatDataModule) -> None:
    data.prepare_data()
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert len(batches) == 5
    for batch in batches:
        assert batch["input_ids"].shape == batch["shift_labels"].shape == batch["attention_mask"].shape
        assert batch["input_ids"].shape[1] in (8, 16)
    samples = data._samples("train")
    sample = samples[len(samples) - 1]
    assert len(sample["input_ids"]) <= 16
    known = sample["shift_labels"] != -100
    assert torch.equal(sample["shift_labels"][:-1][known[:-1]], sample["input_ids"][1:][known[:-1]])
    held = [int(each["attention_mask"].sum()) for each in data.val_dataloader()]
    assert len(held) == 2  # 4 samples, 3 a batch


def test_other_users_of_a_shared_disk_may_read_the_tokens(data: ChatDataModule, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    data.prepare_data()
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.stat().st_mode == (tmp_path / "folder").stat().st_mode


def test_rows_are_filled_up_with_what_nobody_learns() -> None:
    short = {"input_ids": torch.tensor([5]), "shift_labels": torch.tensor([6])}
    long = {"input_ids": torch.arange(9), "shift_labels": torch.arange(9)}
    batch = collate([short, long])
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist() == [1, 9]
    assert (batch["shift_labels"] != -100).sum(1).tolist() == [1, 9]


def test_too_few_samples_and_no_files_are_named(data: ChatDataModule, tmp_path: Path) -> None:
    data.batch_size = 30
    data.prepare_data()
    data.setup("fit")
    with pytest.raises(CorpusError, match=r"16 training samples, fewer than a batch of 30.*data.batch_size=16 or less"):
        data.train_dataloader()
    with pytest.raises(CorpusError, match=r"Name the JSON lines: data.root"):
        ChatDataModule(str(tmp_path / "model"))
    with pytest.raises(ValueError, match="learn='some' is unknown"):
        ChatDataModule(str(tmp_path / "model"), tmp_path, learn="some")


def with_end(tokenizer: Any) -> None:
    tokenizer.eos_token = "<|user|>"


def with_space(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def with_normaliser(tokenizer: Any) -> None:
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()


def with_template(tokenizer: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "")


@pytest.mark.parametrize("change", [with_end, with_space, with_normaliser, with_template])
def test_tokens_of_another_tokenizer_are_made_anew(change: Any) -> None:
    changed = make_tokenizer()
    change(changed)
    encoders = [ConversationEncoder(each, "answers", "tiny") for each in (make_tokenizer(), changed)]
    assert encoders[0].identity() != encoders[1].identity()
    line = json.dumps({"messages": [ASK, {"role": "assistant", "content": "AAaa"}]})
    texts = [each.encode(line, "file:1").tokens.tolist() for each in encoders]
    plain = [each.encode(json.dumps({"text": "two"}), "file:1").tokens.tolist() for each in encoders]
    assert texts[0] != texts[1] or plain[0] != plain[1]


def test_the_same_tokenizer_in_another_process_and_folder_has_the_same_identity(tmp_path: Path) -> None:
    program = (
        "import sys; from transformers import AutoTokenizer; "
        "from azureml_strategy.data.conversations import ConversationEncoder; "
        "print(ConversationEncoder(AutoTokenizer.from_pretrained(sys.argv[1]), 'answers', 'tiny').identity())"
    )
    for name in ("one", "two"):
        make_tokenizer().save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text("{}")
    # The order of this process's sets is another one.
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    command = [sys.executable, "-c", program, str(tmp_path / "one")]
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    there = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    here = AutoTokenizer.from_pretrained(tmp_path / "two")
    assert there == f"{ConversationEncoder(here, 'answers', 'tiny').identity()}\n"
