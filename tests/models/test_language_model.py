"""The LightningModule of the GPT in a real Trainer."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from tests.models.gpts import GPT2, LLAMA
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.models import GPTConfig, LanguageModel, linear_loss
from azureml_strategy.strategies.model_parallel.fsdp_internals import begin_as_root


def _data(rows: int = 16, length: int = 16) -> TensorDataset:
    """Counting, from a random start: the next token is certain."""
    starts = torch.randint(61, (rows, 1), generator=torch.Generator().manual_seed(0))
    tokens = (starts + torch.arange(length + 1)) % 61
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _loader(batch_size: int = 8, **sizes: int) -> DataLoader[Any]:
    return DataLoader(_data(**sizes), batch_size=batch_size)


def _trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **arguments)


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_it_learns_to_count(config: GPTConfig) -> None:
    model = LanguageModel(config, learning_rate=1e-2, warmup_steps=5)
    trainer = _trainer(max_steps=60, check_val_every_n_epoch=30)
    trainer.fit(model, _loader(), _loader())
    assert trainer.callback_metrics["train/loss"] < 0.2 < math.log(61)
    assert trainer.callback_metrics["val/perplexity"] < 1.5


def test_the_same_seed_gives_the_same_model_whatever_torchs_seed() -> None:
    states = []
    for torch_seed, seed in ((1, 5), (2, 5), (2, 6)):
        torch.manual_seed(torch_seed)
        model = LanguageModel(LLAMA, seed=seed)
        model.configure_model()
        states.append(model.state_dict())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    assert not torch.equal(states[1]["layers.1.mlp.up.weight"], states[2]["layers.1.mlp.up.weight"])


def test_metrics_are_means_over_the_tokens_that_count() -> None:
    inputs, targets = _data(11).tensors
    targets = targets.clone()
    targets[:4] = -100  # the first batch has no token that counts, and the last is smaller
    targets[5, 3:] = -100
    model = LanguageModel(LLAMA)
    (metrics,) = _trainer().validate(model, DataLoader(TensorDataset(inputs, targets), batch_size=4), verbose=False)
    with torch.no_grad():
        logits = model.eval()(inputs)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert metrics == pytest.approx({"val/loss": expected, "val/perplexity": math.exp(expected)}, rel=1e-5)
    (tested,) = _trainer().test(model, DataLoader(TensorDataset(inputs, targets), batch_size=3), verbose=False)
    assert tested == pytest.approx({"test/loss": expected, "test/perplexity": math.exp(expected)}, rel=1e-5)


class _NotWeighed(LanguageModel):
    """Its gradients are not weighed by labels: a mean over samples is meant."""

    def labels_of(self, batch: Any) -> Any:
        return None


def test_an_evaluation_counts_tokens_also_where_no_gradient_is_weighed() -> None:
    one, other = (
        _trainer().validate(kind(LLAMA, seed=1), _loader(), verbose=False)[0] for kind in (LanguageModel, _NotWeighed)
    )
    assert other["val/loss"] == one["val/loss"]


def test_the_optimizer_is_adamw_with_warmup_and_no_decay_of_gains() -> None:
    model = LanguageModel(GPT2, learning_rate=0.5, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2, warmup_steps=2)
    rates: list[float] = []
    model.on_train_batch_start = lambda batch, batch_idx: rates.append(  # type: ignore[method-assign]
        model.optimizers().param_groups[0]["lr"]
    )
    _trainer(max_steps=4).fit(model, _loader())
    assert rates == pytest.approx([0.25, 0.5, 0.5, 0.25])
    decayed, others = model.optimizers().param_groups
    assert (decayed["betas"], decayed["eps"], decayed["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.2)
    assert others["weight_decay"] == 0.0
    assert len(decayed["params"]) == 2 + 3 * 6  # the tied table once, positions, six matrices a block
    assert sum(parameter.numel() for group in (decayed, others) for parameter in group["params"]) == GPT2.parameters()


def test_a_checkpoint_loads_and_goes_on(tmp_path: Path) -> None:
    model = LanguageModel(GPT2, learning_rate=1e-2, seed=3)
    trainer = _trainer(max_steps=3)
    trainer.fit(model, _loader())
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = LanguageModel.load_from_checkpoint(tmp_path / "model.ckpt", network=GPT2)
    assert (loaded.hparams["learning_rate"], loaded.hparams["seed"]) == (1e-2, 3)
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert loaded.layers[0].weight is loaded.layers[-1].weight


def test_names_are_places_in_the_chain() -> None:
    model = LanguageModel(LLAMA)
    model.configure_model()
    model.configure_model()  # as before each of fit, validate and test
    names = [name for name, _ in model.named_parameters()]
    assert len(model.layers) == len(model.pipeline_layers()) == 3 + 3
    assert names[:3] == ["layers.0.weight", "layers.1.attention_norm.weight", "layers.1.attention.query.weight"]
    assert names[-2:] == ["layers.4.weight", "layers.5.weight"]


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_tensor_parallel_plan_names_every_matrix_of_the_blocks(config: GPTConfig) -> None:
    model = LanguageModel(config)
    model.configure_model()
    assert list(model.sharded_blocks()) == list(model.layers[1:4])
    matrices = {name for name, _ in model.layers[1].named_modules() if isinstance(_, torch.nn.Linear)}
    plan = model.tensor_parallel_plan()
    assert {name.removeprefix("layers.*.") for name in plan} == matrices
    assert {name for name, style in plan.items() if style == "rowwise"} == {
        "layers.*.attention.output",
        "layers.*.mlp.down",
    }
    assert list(model.tensor_parallel_counts().values()) == [4, config.key_value_heads]


class _Recorded(LanguageModel):
    """Notes the losses, and the gradients of the first step before they are clipped."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config, learning_rate=1e-2, warmup_steps=2, seed=1)
        self.losses: list[float] = []
        self.first: dict[str, Tensor] = {}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.first = self.first or {name: each.grad.clone() for name, each in self.named_parameters()}


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["tied", "untied"])
def test_the_loss_in_chunks_trains_as_the_loss_of_logits(config: GPTConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With batches of unequal numbers of labels, accumulated, and one without any."""
    inputs, targets = _data(24).tensors
    targets = targets.clone()
    targets[3:9, 5:] = -100
    targets[12:16] = -100
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=4)
    models, metrics = [], []
    for few_logits in (linear_loss._FEW_LOGITS, 0):
        monkeypatch.setattr(linear_loss, "_FEW_LOGITS", few_logits)
        monkeypatch.setattr(linear_loss, "_CHUNK", {"cpu": 24})
        models.append(_Recorded(config))
        trainer = _trainer(max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=0.5)
        trainer.fit(models[-1], loader)
        metrics += trainer.validate(models[-1], loader, verbose=False)
    plain, chunked = models
    assert chunked.losses != plain.losses, "nothing was computed in chunks"
    assert chunked.losses == pytest.approx(plain.losses, rel=1e-5)
    torch.testing.assert_close(chunked.first, plain.first, rtol=1e-6, atol=1e-6)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)


class _Scaled(LanguageModel):
    def forward(self, tokens: Tensor) -> Tensor:
        return 0.5 * super().forward(tokens)


class _Smoothed(LanguageModel):
    def pipeline_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("kind", [_Scaled, _Smoothed, "hook of the output", "hook of the module"])
def test_who_reads_logits_still_has_them(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_FEW_LOGITS", 0)
    model = kind(LLAMA) if isinstance(kind, type) else LanguageModel(LLAMA)
    model.configure_model()
    batch, seen = _data(8).tensors, []
    expected = model.pipeline_loss(model(batch[0]), batch[1])
    if isinstance(kind, str):
        watched = model if kind == "hook of the module" else model.layers[-1]
        watched.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert torch.equal(model.evaluation_loss(batch), expected)
    assert seen == ([(8, 16, 61)] if isinstance(kind, str) else [])


class _Data(LightningDataModule):
    def __init__(self, **facts: int) -> None:
        super().__init__()
        vars(self).update(facts)
        self.asked = False

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        self.asked = True
        return _loader()


def test_a_loss_or_an_output_that_somebody_has_replaced_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_FEW_LOGITS", 0)
    inputs, targets = _data(8).tensors
    model = LanguageModel(LLAMA)
    model.configure_model()
    output: Any = model.layers[-1]
    plain = output.forward
    monkeypatch.setattr(output, "forward", lambda states, *others: plain(states, *others).tanh())
    assert torch.equal(model.evaluation_loss((inputs, targets)), model.pipeline_loss(model(inputs), targets))
    monkeypatch.setattr(model, "pipeline_loss", lambda outputs, targets: outputs.sum() * 0 + 7)
    assert model.evaluation_loss((inputs, targets)) == 7
    monkeypatch.undo()
    monkeypatch.setattr(LanguageModel, "pipeline_loss", lambda self, outputs, targets: outputs.sum() * 0 + 8)
    assert model.evaluation_loss((inputs, targets)) == 8


def test_hooks_of_strategies_leave_the_loss_to_the_output() -> None:
    model = LanguageModel(LLAMA)
    model.configure_model()
    output: Any = model.layers[-1]
    assert output.may_give_loss()
    output.register_forward_pre_hook(partial(begin_as_root))  # what FSDP2 is gathered by
    assert output.may_give_loss()
    handle = output.register_full_backward_hook(lambda *_: None)
    assert not output.may_give_loss()
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not output.may_give_loss()
    handle.remove()
    output.register_forward_hook(partial(lambda *_: None))
    assert not output.may_give_loss()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"vocab_size": 62}, r"network has 61 tokens, but the tokenizer has 62.*model.network.vocab_size=62"),
        ({"sequence_length": 17}, r"sequences of 17 tokens, but the network is for 16\..*sequence_length=16"),
    ],
)
def test_data_that_does_not_fit_is_an_error_before_training(facts: dict[str, int], words: str) -> None:
    data = _Data(**facts)
    with pytest.raises(ValueError, match=words):
        _trainer(max_steps=1).fit(LanguageModel(LLAMA), datamodule=data)
    assert not data.asked
    fitting = dataclasses.replace(LLAMA, vocab_size=62, context=17)
    _trainer(max_steps=1).fit(LanguageModel(fitting), datamodule=data)
