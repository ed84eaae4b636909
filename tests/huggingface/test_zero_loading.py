"""What load_under_zero_3 reads; tests/multiprocess/test_zero_huggingface.py loads models with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from azureml_strategy.huggingface.transformers_internals import class_for
from azureml_strategy.huggingface.zero_loading import FileTensor, read_weights

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")


def test_weights_are_read_when_they_are_used(tmp_path: Path) -> None:
    saved = {"whole": torch.randn(3, 4), "half": torch.randn(2).to(torch.bfloat16), "scalar": torch.tensor(3)}
    safetensors_torch.save_file(saved, tmp_path / "model.safetensors")
    read = dict(read_weights([tmp_path / "model.safetensors"], values=True))
    facts = dict(read_weights([tmp_path / "model.safetensors"], values=False))
    for name, expected in saved.items():
        weight = read[name]
        assert isinstance(weight, FileTensor)
        assert (weight.shape, weight.dtype) == (expected.shape, expected.dtype)
        assert (facts[name].shape, facts[name].dtype, facts[name].is_meta) == (expected.shape, expected.dtype, True)
        assert torch.equal(torch.empty_like(expected).copy_(weight), expected)
        assert torch.equal(torch.stack([weight, weight])[1], expected)


def test_a_class_without_a_model_for_the_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="AutoModelForCausalLM has no model for ViTConfig"):
        class_for(transformers.AutoModelForCausalLM, transformers.ViTConfig())
    assert class_for(transformers.AutoModelForCausalLM, transformers.LlamaConfig()) is transformers.LlamaForCausalLM
