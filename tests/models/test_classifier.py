"""The LightningModule in a real Trainer, with networks small enough to see through."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from azureml_strategy.interfaces import IGNORED_LABEL
from azureml_strategy.models import ImageClassifier, ResNet50
from azureml_strategy.models.classifier import IMAGENET_MEAN, IMAGENET_STD


def _network(classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


def _data(samples: int = 24) -> TensorDataset:
    """Images whose class is their brightest channel."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 100, (samples, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels = torch.randint(3, (samples,), generator=generator)
    images[torch.arange(samples), labels] += 120
    return TensorDataset(images, labels)


def _trainer(**arguments: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, enable_model_summary=False, **quiet, **arguments)


def _peak(classifier: ImageClassifier) -> float:
    return classifier.optimizers().param_groups[0]["initial_lr"]


def test_a_few_steps_lower_the_loss() -> None:
    classifier = ImageClassifier(_network(), learning_rate=3.0, warmup_epochs=0.5, label_smoothing=0.0)
    loader = DataLoader(_data(), batch_size=8)
    before = _trainer().validate(classifier, loader, verbose=False)[0]
    _trainer(max_epochs=8).fit(classifier, loader)
    after = _trainer().validate(classifier, loader, verbose=False)[0]
    assert after["val/loss"] < 0.7 * before["val/loss"]
    assert after["val/top1"] > before["val/top1"]


def test_resnet_trains_in_mixed_precision_and_channels_last() -> None:
    classifier = ImageClassifier(ResNet50(3), learning_rate=0.1, channels_last=True)
    weights = classifier.network.conv1.weight
    assert weights.is_contiguous(memory_format=torch.channels_last)
    before = weights.detach().clone()
    trainer = _trainer(max_steps=2, precision="bf16-mixed")
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    trainer.fit(classifier, DataLoader(TensorDataset(images, torch.tensor([0, 1, 2, 0])), batch_size=2))
    assert trainer.callback_metrics["train/loss"].isfinite()
    assert not torch.equal(weights.detach(), before)


def test_pixels_are_normalised_as_published() -> None:
    classifier = ImageClassifier(nn.Identity())
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = torch.tensor(IMAGENET_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_STD).view(3, 1, 1)
    torch.testing.assert_close(classifier(images), (images / 255 - mean) / std, atol=1e-5, rtol=1e-5)
    ready = torch.randn(2, 3, 4, 5)
    assert torch.equal(classifier(ready), ready)


def test_under_autocast_a_convolution_gets_pixels_that_are_cast_once() -> None:
    """To the same numbers to which the convolution would cast those of float32; other networks get float32."""
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    resnet, other = (ImageClassifier(network, channels_last=True) for network in (ResNet50(3), nn.Identity()))
    precise = resnet.normalise(images)
    assert torch.equal(precise, images.float().mul(other.normalise.scale).add(other.normalise.shift))
    with torch.autocast("cpu", torch.bfloat16):
        cast = resnet.normalise(images)
        assert torch.equal(cast, precise.bfloat16())
        assert cast.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(other.normalise(images), precise)


def test_channels_last_reaches_the_network_and_changes_nothing() -> None:
    images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    seen = ImageClassifier(nn.Identity(), channels_last=True)(images)
    assert seen.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(
        ImageClassifier(_network(), channels_last=True)(images), ImageClassifier(_network())(images)
    )


def test_synchronised_normalisation_keeps_names_and_settings() -> None:
    classifier = ImageClassifier(ResNet50(3))
    names = list(classifier.state_dict())
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(classifier)
    assert list(converted.state_dict()) == names
    assert isinstance(converted.network.bn1, nn.SyncBatchNorm)


def test_the_normalisation_is_not_in_the_checkpoint() -> None:
    classifier = ImageClassifier(_network())
    assert {name.split(".")[0] for name in classifier.state_dict()} == {"network"}


class _Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _network()

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_network_is_compiled_and_keeps_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # torch writes it: put back at the end
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # leaves no process pool behind
    counters.clear()
    classifier, plain = (ImageClassifier(_Wrapped(), compile=choice, warmup_epochs=0) for choice in (True, False))
    loader = DataLoader(_data(16), batch_size=8)
    for module in (classifier, plain):
        _trainer(max_steps=2).fit(module, loader)
    assert counters["stats"]["unique_graphs"] == 1
    state, expected = classifier.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-4)


def test_compiling_what_torch_would_not_compile_is_an_error() -> None:
    with pytest.raises(ValueError, match="compile=True has no effect on a bare Sequential"):
        ImageClassifier(_network(), compile=True)


@pytest.mark.parametrize(("accumulate", "rate"), [(1, 0.1 * 8 / 256), (3, 0.1 * 24 / 256)])
def test_the_learning_rate_is_scaled_by_the_global_batch(accumulate: int, rate: float) -> None:
    classifier = ImageClassifier(_network(), learning_rate=0.1)
    _trainer(max_steps=1, accumulate_grad_batches=accumulate).fit(classifier, DataLoader(_data(), batch_size=8))
    assert _peak(classifier) == pytest.approx(rate)


def test_the_learning_rate_follows_the_schedule_every_step() -> None:
    classifier = ImageClassifier(_network(), learning_rate=32.0, warmup_epochs=1.5)  # peak 1.0 for 8 images
    rates: list[float] = []
    classifier.on_train_batch_start = lambda batch, batch_idx: rates.append(  # type: ignore[method-assign]
        classifier.optimizers().param_groups[0]["lr"]
    )
    _trainer(max_epochs=3).fit(classifier, DataLoader(_data(16), batch_size=8))
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 0.75, 0.25])


def test_the_optimizer_is_nesterovs() -> None:
    classifier = ImageClassifier(_network(), momentum=0.8, weight_decay=0.01)
    _trainer(max_steps=1).fit(classifier, DataLoader(_data(), batch_size=8))
    decayed, others = classifier.optimizers().param_groups
    assert (decayed["nesterov"], decayed["momentum"], decayed["weight_decay"]) == (True, 0.8, 0.01)
    assert others["weight_decay"] == 0.0


@pytest.mark.parametrize("stage", ["val", "test"])
def test_metrics_are_those_of_the_valid_samples(stage: str) -> None:
    images, labels = _data(11).tensors
    labels[[0, 1, 2, 3, 9]] = IGNORED_LABEL  # the first batch has no valid sample, and the last is smaller
    classifier = ImageClassifier(_network())
    trainer = _trainer()
    run = trainer.validate if stage == "val" else trainer.test
    (metrics,) = run(classifier, DataLoader(TensorDataset(images, labels), batch_size=4), verbose=False)
    valid = labels != IGNORED_LABEL
    with torch.no_grad():
        logits = classifier.eval()(images)[valid]
    expected = torch.nn.functional.cross_entropy(logits, labels[valid])
    assert metrics[f"{stage}/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics[f"{stage}/top1"] == pytest.approx((logits.argmax(1) == labels[valid]).float().mean().item())
    assert metrics[f"{stage}/top5"] == 1.0


def test_predictions_are_probabilities() -> None:
    classifier = ImageClassifier(_network())
    batches = _trainer().predict(classifier, DataLoader(_data(5), batch_size=4))
    assert batches is not None
    probabilities = torch.cat(batches)
    assert probabilities.shape == (5, 3)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(5))


class _Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from _data(16)


def test_a_stream_without_length_needs_an_end_in_steps() -> None:
    loader = DataLoader(_Stream(), batch_size=8)
    with pytest.raises(ValueError, match=r"number of training steps is not known.*max_steps=-1"):
        _trainer(max_epochs=1).fit(ImageClassifier(_network(), warmup_epochs=0), loader)
    with pytest.raises(ValueError, match=r"warmup_epochs=5.0 cannot be counted.*set warmup_epochs=0"):
        _trainer(max_steps=1).fit(ImageClassifier(_network()), loader)
    _trainer(max_steps=1).fit(ImageClassifier(_network(), warmup_epochs=0), loader)


def test_an_unknown_batch_size_is_an_error_and_that_of_a_batch_sampler_is_known() -> None:
    data = _data(16)
    with pytest.raises(ValueError, match=r"batch size of the train dataloader \(list\) is not known"):
        _trainer(max_steps=1).fit(ImageClassifier(_network()), [data[:8], data[8:]])
    sampler = torch.utils.data.BatchSampler(range(16), batch_size=4, drop_last=False)
    classifier = ImageClassifier(_network(), learning_rate=64.0)
    _trainer(max_steps=1).fit(classifier, DataLoader(data, batch_sampler=sampler))
    assert _peak(classifier) == pytest.approx(1.0)


class _TenClasses(LightningDataModule):
    num_classes = 10

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(_data(), batch_size=8)


def test_fewer_outputs_than_classes_is_an_error_that_names_both() -> None:
    with pytest.raises(ValueError, match=r"3 outputs, but the data has 10 classes.*num_classes=10"):
        _trainer(max_steps=1).fit(ImageClassifier(_network(3)), datamodule=_TenClasses())
    _trainer(max_steps=1).fit(ImageClassifier(_network(10)), datamodule=_TenClasses())


def test_a_checkpoint_loads_with_its_settings(tmp_path: Any) -> None:
    classifier = ImageClassifier(_network(), label_smoothing=0.3)
    trainer = _trainer(max_steps=1)
    trainer.fit(classifier, DataLoader(_data(), batch_size=8))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = ImageClassifier.load_from_checkpoint(tmp_path / "model.ckpt", network=_network())
    assert loaded.hparams["label_smoothing"] == 0.3
    assert torch.equal(loaded.network[0].weight, classifier.network[0].weight)


@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_beside_the_network_are_named(frozen: bool, recwarn: pytest.WarningsRecorder) -> None:
    classifier = ImageClassifier(_network())
    classifier.teacher = _network().requires_grad_(not frozen)
    _trainer(max_steps=1).fit(classifier, DataLoader(_data(), batch_size=8))
    told = [str(each.message) for each in recwarn if "trains self.network" in str(each.message)]
    assert len(told) == (not frozen)
    assert all("not 6 parameters beside it: teacher.0.weight, teacher.0.bias, " in text for text in told)
