"""Models' files and records that somebody else may have made: no name leads out, and nothing is fetched to run."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.checkpoint.serialization import HUGGING_FACE
from azureml_strategy.huggingface import PretrainedModelError
from azureml_strategy.huggingface.export import skeleton
from azureml_strategy.huggingface.loading import open_slices
from azureml_strategy.huggingface.record import CheckpointRecord, ModelRecord
from azureml_strategy.huggingface.sources import Source

MODEL = {
    "prefix": "m",
    "kind": "GPT2LMHeadModel",
    "config": "{}",
    "generation_config": None,
    "source": "",
    "revision": None,
}
BYTES = torch.zeros(3, dtype=torch.uint8)


def entry(tokenizer: Any = None, adapters: Any = None, **model: Any) -> dict[str, Any]:
    text = json.dumps({"models": [{**MODEL, "adapters": adapters, **model}], "base": None})
    return {HUGGING_FACE: {"record": text, "tokenizer": tokenizer or {}}}


@pytest.mark.parametrize(
    "checkpoint",
    [
        entry({"../../.bashrc": BYTES}),
        entry({"/etc/cron.d/x": BYTES}),
        entry({"a/b": BYTES}),
        entry({"tokenizer.json": "text"}),
        entry({"tokenizer.json": torch.zeros(3)}),
        entry(adapters={"prefix": "", "configs": {"../../x": {}}}),
        entry(config=5),
        entry(unknown=5),
        {HUGGING_FACE: {"record": "[" * 10_000, "tokenizer": {}}},
        {HUGGING_FACE: {"record": "{}", "tokenizer": {}}},
        {HUGGING_FACE: 5},
    ],
    ids=repr,
)
def test_a_record_that_leads_out_or_is_damaged_is_refused(checkpoint: dict[str, Any]) -> None:
    with pytest.raises(CheckpointFormatError, match="transformers models is damaged"):
        CheckpointRecord.of(checkpoint)
    assert CheckpointRecord.of(entry({"tokenizer.json": BYTES})) is not None


def record(**model: Any) -> ModelRecord:
    return ModelRecord(**{**MODEL, "adapters": None, **model})


@pytest.mark.parametrize("kind", ["pipeline", "AutoModel", "logging", "GPT2Config", "__init__", "a.b"])
def test_only_a_class_of_a_model_is_made(kind: str) -> None:
    with pytest.raises(CheckpointFormatError, match="a class that transformers does not have"):
        skeleton(record(kind=kind))


def test_a_configuration_fetches_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers runs kernels of the hub that a configuration names, if it is installed with them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    small = {"n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 5, "auto_map": {"AutoModel": "evil/repo--x.Y"}}
    for name in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
        made = skeleton(record(config=json.dumps({**small, name: "evil/kernel"})))
        assert "evil" not in made.config.to_json_string(use_diff=False)
        assert made.config._attn_implementation != "evil/kernel"


@pytest.mark.parametrize(
    "index", ['{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 5}}', "[]", "{", '{"weight_map": {"a": "/x"}}']
)
def test_an_index_of_weights_stays_in_its_folder(index: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(PretrainedModelError, match=r"has a damaged model\.safetensors\.index\.json"):
        Source("a/b", None, tmp_path).weight_files()


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]},
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "a", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        [],
        {},
    ],
    ids=str,
)
def test_a_header_makes_no_room_for_more_than_the_file(facts: Any, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2)}, file)
    with open_slices([file]) as found:
        assert torch.equal(found["weight"][...], torch.ones(2))
    told = json.dumps({"weight": facts}).encode()
    file.write_bytes(struct.pack("<Q", len(told)) + told + bytes(8))
    with pytest.raises(OSError, match=r"has a damaged header|The file ends"), open_slices([file]) as found:
        _ = found["weight"][...]
