"""Means over labels in one process: accumulated batches, repeated samples, and subclasses with steps of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from azureml_strategy.models import ImageClassifier

_IGNORED = -100


class Classifier(ImageClassifier):
    """Plain SGD, which shows the scale of gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(3, 4)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _trainer(**arguments: Any) -> Trainer:
    quiet: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return Trainer(**{**quiet, **arguments})


def _samples(number: int, ignored: int = 0) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    images = torch.randn(number, 3, 1, 1, generator=random)
    labels = torch.randint(4, (number,), generator=random)
    labels[:ignored] = _IGNORED
    return TensorDataset(images, labels)


def _weights(module: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in module.parameters()])


class HalvesTheThirdStep(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for parameter in pl_module.parameters():
            if trainer.global_step == 2 and parameter.grad is not None:
                parameter.grad.mul_(0.5)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulated_batches_count_by_their_labels(clip: float | None) -> None:
    """The third step has one batch, of two that are accumulated elsewhere, and half the size, as Lightning has it."""
    trained = []
    for batch_size, accumulate, callbacks in ((8, 1, [HalvesTheThirdStep()]), (4, 2, [])):
        module = Classifier()
        trainer = _trainer(accumulate_grad_batches=accumulate, gradient_clip_val=clip, callbacks=callbacks)
        trainer.fit(module, DataLoader(_samples(20, ignored=3), batch_size))
        assert trainer.global_step == 3
        trained.append(_weights(module))
    assert torch.allclose(*trained, atol=1e-6)


def test_a_batch_without_labels_adds_nothing_to_an_accumulated_step() -> None:
    data = _samples(8, ignored=4)
    labelled = TensorDataset(*(each[4:] for each in data.tensors))
    trained = []
    for samples, accumulate in ((data, 2), (labelled, 1)):
        module = Classifier()
        _trainer(accumulate_grad_batches=accumulate).fit(module, DataLoader(samples, 4))
        trained.append(_weights(module))
    assert torch.allclose(*trained, atol=1e-6)


class StartsBatches(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return None


class EndsBackward(Classifier):
    def on_after_backward(self) -> None:
        """Leaves out the base's."""


@pytest.mark.parametrize(
    ("module", "hook"), [(StartsBatches, "on_train_batch_start"), (EndsBackward, "on_after_backward")]
)
def test_a_hook_that_leaves_out_the_base_is_an_error(module: type[Classifier], hook: str) -> None:
    trainer = _trainer(accumulate_grad_batches=2)
    with pytest.raises(MisconfigurationException, match=rf"{module.__name__}\.{hook} does not call super\(\)\.{hook}"):
        trainer.fit(module(), DataLoader(_samples(12), 4))
    assert trainer.global_step <= 1


def _second_share(data: TensorDataset) -> DataLoader[Any]:
    """Of 7 samples, the second of two ranks reads the 1st, 3rd and 5th, and then the first of all once more."""
    return DataLoader(data, 3, sampler=DistributedSampler(data, num_replicas=2, rank=1, shuffle=False))


def test_samples_that_the_sampler_repeats_are_not_evaluated() -> None:
    data = _samples(7)
    module, trainer = Classifier(), _trainer()
    (found,) = trainer.validate(module, _second_share(data), verbose=False)
    own = TensorDataset(*(each[1::2] for each in data.tensors))
    (expected,) = trainer.validate(module, DataLoader(own, 2), verbose=False)
    assert found == pytest.approx(expected, rel=1e-6)
    (tested,) = trainer.test(module, _second_share(data), verbose=False)
    assert list(tested.values()) == pytest.approx(list(expected.values()), rel=1e-6)


def test_a_validation_of_ones_own_sees_the_labels_that_there_are() -> None:
    class Own(Classifier):
        seen: list[int]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen += batch[1].tolist()

        def on_validation_epoch_end(self) -> None:
            pass

    data = _samples(7)
    module = Own()
    module.seen = []
    _trainer().validate(module, _second_share(data), verbose=False)
    assert module.seen == data.tensors[1][[1, 3, 5, 0]].tolist()


def test_a_subclass_with_other_batches_trains_as_before() -> None:
    class Triples(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            images, labels, weights = batch
            return (nn.functional.cross_entropy(self(images), labels, reduction="none") * weights).mean()

    images, labels = _samples(8).tensors
    module = Triples()
    before = _weights(module)
    _trainer(accumulate_grad_batches=2).fit(module, DataLoader(TensorDataset(images, labels, torch.ones(8)), 2))
    assert not torch.equal(before, _weights(module))
