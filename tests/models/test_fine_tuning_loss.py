"""The loss of FineTuner in chunks against that of transformers' logits, and which models have it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Trainer
from tests.tiny_model import save_tiny_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader

from azureml_strategy.models import FineTuner, fine_tuning_loss
from azureml_strategy.models.fine_tuning_loss import loss_in_chunks, passes_logits_on

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "Llama": {},
    "Mistral": {},
    "Qwen3": {},
    "Gemma": {},
    "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32},
    "GPTNeoX": {},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Gemma2": {"final_logit_softcapping": 2.0},  # caps its logits
    "Cohere": {"logit_scale": 0.5},
    "Granite": {"logits_scaling": 2.0},
    "Phi": {},  # its output layer has a bias
}
AS_THEY_ARE = set(MODELS) - {"Gemma2", "Cohere", "Granite", "Phi"}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **MODELS[kind])
    return transformers.AutoModelForCausalLM.from_config(config).eval()  # without dropout


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(48, (2, 13), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[0, 5:] = -100
    return tokens, labels


def loss_of(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    count = torch.tensor(31.0)  # of all ranks and batches: another one than there are here
    loss: Tensor = model(
        input_ids=tokens, labels=labels, shift_labels=labels, num_items_in_batch=count, use_cache=False
    ).loss
    return loss


def in_chunks(model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    with loss_in_chunks(model, labels, torch.tensor(31.0)):
        return loss_of(model, tokens, labels)


def gradients(loss: Callable[[Any, Tensor, Tensor], Tensor], model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    value = loss(model, *batch())
    value.backward()
    found = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {**found, "loss": value.detach()}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The matrices whose loss was computed in chunks, which it is of few logits too."""
    calls: list[Tensor] = []
    compute = fine_tuning_loss.linear_cross_entropy

    def spying(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        calls.append(weight)
        return compute(hidden, weight, targets)

    monkeypatch.setattr(fine_tuning_loss, "linear_cross_entropy", spying)
    monkeypatch.setattr(fine_tuning_loss, "takes_chunks", lambda weight, targets: True)
    return calls


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_changes_its_logits_has_no_loss_in_chunks(kind: str, taken: list[Tensor]) -> None:
    """And one that does not has the same loss and gradients."""
    model = model_of(kind)
    before = {name: vars(each).copy() for name, each in model.named_modules()}
    assert passes_logits_on(model) == (kind in AS_THEY_ARE)
    assert all(vars(each).keys() - {"_loss_function"} <= before[name].keys() for name, each in model.named_modules())
    if kind in AS_THEY_ARE:
        expected = gradients(loss_of, model)
        torch.testing.assert_close(gradients(in_chunks, model), expected, rtol=1e-5, atol=1e-6)
        assert len(taken) == 1
        torch.testing.assert_close(gradients(loss_of, model), expected, rtol=0, atol=0)  # it is as it was


@pytest.mark.parametrize("kind", ["twice", "shorter", "own loss", "replaced", "added", "added in place"])
def test_what_a_users_model_does_with_its_logits_is_found(kind: str) -> None:
    class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> Any:
            hidden = self.model(input_ids=input_ids).last_hidden_state
            logits = self.lm_head(hidden)
            if kind == "twice":
                self.loss_function(logits, labels, self.config.vocab_size, **others)
            if kind == "shorter":
                logits = logits[:, :-1]
            loss = self.loss_function(logits, labels, self.config.vocab_size, **others)
            if kind == "added":
                loss = loss + 0.01 * logits.logsumexp(-1).pow(2).mean()
            if kind == "added in place":
                loss += 0.01 * logits.logsumexp(-1).pow(2).mean()
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    model = Own(transformers.LlamaConfig(**SIZES))
    if kind == "own loss":
        model.loss_function = lambda logits, labels, vocab_size, **others: logits.sum()
    if kind == "replaced":
        model.lm_head.forward = lambda hidden: nn.functional.linear(hidden, model.lm_head.weight) / 2
    assert not passes_logits_on(model)


def test_a_configuration_that_is_changed_later_is_refused(taken: list[Tensor]) -> None:
    model = model_of("Gemma2")
    model.config.final_logit_softcapping = None
    assert passes_logits_on(model)
    model.config.final_logit_softcapping = 2.0
    with pytest.raises(RuntimeError, match="Gemma2ForCausalLM changes its logits before their loss"):
        in_chunks(model, *batch())
    assert float(loss_of(model, *batch())) > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("loss") / "tiny", vocabulary=48)


def samples() -> list[dict[str, Tensor]]:
    return [
        {"input_ids": row, "shift_labels": labels, "attention_mask": torch.ones_like(row)}
        for row, labels in zip(*batch(), strict=True)
    ] * 3


def trained(folder: Path, precision: Any = "32-true", prepare: Any = None, **settings: Any) -> dict[str, Tensor]:
    """The parameters after three steps."""
    torch.manual_seed(0)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=3, accelerator="cpu", precision=precision, enable_model_summary=False, **quiet)
    module = FineTuner(str(folder), learning_rate=0.01, **settings)
    module.trainer = trainer
    module.configure_model()
    if prepare is not None:
        prepare(module)
    trainer.fit(module, DataLoader(samples(), batch_size=2))
    return {name: each.detach() for name, each in module.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(
    "settings", [{}, {"lora_rank": 2}, {"activation_checkpointing": True}], ids=["whole", "adapters", "recomputed"]
)
def test_training_is_the_same(folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes losses in float32 in any precision, and AdamW makes much of small differences."""
    expected = trained(folder, "64-true", **settings)
    monkeypatch.setattr(fine_tuning_loss, "takes_chunks", lambda weight, targets: True)
    torch.testing.assert_close(trained(folder, "64-true", **settings), expected, rtol=1e-4, atol=1e-6)


def test_under_autocast_it_is_no_less_exact(folder: Path, taken: list[Tensor]) -> None:
    module = FineTuner(str(folder))
    module.trainer = Trainer(accelerator="cpu", logger=False)
    module.configure_model()
    precise = gradients(loss_of, module.model)

    def error(loss: Any) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(loss, module.model)
        assert found["loss"].dtype is torch.float32
        return max(float((found[name] - each).norm() / each.norm()) for name, each in precise.items())

    assert error(in_chunks) < 1.1 * error(loss_of)
    assert len(taken) == 1


def hook(module: FineTuner) -> None:
    shapes.clear()
    module.model.get_output_embeddings().register_forward_hook(lambda *call: shapes.append(call[2].shape))


def hook_around(module: FineTuner) -> None:
    shapes.clear()
    module.model.register_forward_hook(lambda *call: shapes.append(call[2].logits.shape))


def hook_adapters(module: FineTuner) -> None:
    shapes.clear()
    module.model.base_model.register_forward_hook(lambda *call: shapes.append(call[2].logits.shape))


shapes: list[torch.Size] = []


@pytest.mark.parametrize(
    ("watch", "rank"), [(hook, 0), (hook_around, 0), (hook, 2), (hook_around, 2), (hook_adapters, 2)]
)
def test_who_watches_the_logits_gets_them(folder: Path, taken: list[Tensor], watch: Any, rank: int) -> None:
    trained(folder, prepare=watch, lora_rank=rank)
    assert shapes == [(2, 13, 48)] * 3
    assert not taken


def add_bias(module: FineTuner) -> None:
    layer = module._pretrained.get_output_embeddings()
    layer.bias = nn.Parameter(torch.linspace(-1, 1, layer.out_features))


def smooth_labels(module: FineTuner) -> None:
    def loss_of(logits: Tensor, *args: Any, shift_labels: Tensor, **kwargs: Any) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), label_smoothing=0.1)

    module._pretrained.loss_function = loss_of


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("change", [add_bias, smooth_labels])
def test_a_loss_that_is_changed_later_is_computed_of_the_logits(
    folder: Path, taken: list[Tensor], change: Any, rank: int
) -> None:
    trained(folder, prepare=change, lora_rank=rank)
    assert not taken


def test_derivatives_of_gradients_are_told_what_to_do(folder: Path, taken: list[Tensor]) -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    module = FineTuner(str(folder))
    module.trainer = Trainer(accelerator="cpu", logger=False)
    module.configure_model()
    tokens, labels = batch()

    def slope() -> Tensor:
        loss, _ = module._losses({"input_ids": tokens, "shift_labels": labels}, torch.tensor(31.0))
        return torch.autograd.grad(loss, module.model.get_output_embeddings().weight, create_graph=True)[0]

    with pytest.raises(RuntimeError, match=r"module.model.loss_function = .*ForCausalLMLoss"):
        slope()
    module.model.loss_function = lambda *args, **kwargs: ForCausalLMLoss(*args, **kwargs)
    assert slope().requires_grad
    assert len(taken) == 1


def test_adapters_of_the_output_layer_and_compiled_models_have_logits(folder: Path, taken: list[Tensor]) -> None:
    trained(folder, lora_rank=2, lora_targets=["q_proj", "lm_head"])
    trained(folder, prepare=lambda module: module.model.compile(backend="eager"))
    trained(folder, prepare=lambda module: setattr(module, "_losses", torch.compile(module._losses, backend="eager")))
    assert not taken


def test_it_keeps_less_than_half_of_what_logits_keep() -> None:
    """With Llama 3's vocabulary, counted in the tensors that autograd saves."""
    sizes = {**SIZES, "vocab_size": 128256, "num_hidden_layers": 1}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    tokens = torch.randint(128256, (2, 100))

    def saved(loss: Any) -> int:
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            assert loss(model, tokens, tokens).requires_grad
        return sum(storages.values())

    assert saved(in_chunks) < 0.5 * saved(loss_of)
