"""A LightningModule that trains an image classifier: any network from images to logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from azureml_strategy.interfaces import IGNORED_LABEL, ChainLayer
from azureml_strategy.models import optimizer as recipe
from azureml_strategy.models.evaluation import at_least_float32, evaluation_means, evaluation_sums, mean_cross_entropy
from azureml_strategy.models.label_means import MeanOverLabels
from azureml_strategy.models.linear_loss import computing_type
from azureml_strategy.models.optimizer import scaled_learning_rate
from azureml_strategy.models.resnet import ResNet50

# Means and standard deviations of ImageNet's training set, RGB, 0 to 1, as in torchvision's references.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Batch = tuple[Tensor, Tensor]


@runtime_checkable
class Chained(Protocol):
    """A network that is a chain of its submodules."""

    def chain(self) -> list[tuple[str, str]]:
        """Return name and kind of each layer, in order. The input of each is the output of the one before."""


class Normalisation(nn.Module):
    """Brings images into a memory format, and pixels from 0 to 255 to mean 0 and standard deviation 1.

    Args:
        mean: of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel, likewise.
        memory_format: of the images that it returns.
        for_convolution: only a convolution reads what it returns. Under autocast it returns the 16 bits to which that
            would cast it.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        memory_format: torch.memory_format,
        for_convolution: bool = False,
    ) -> None:
        super().__init__()
        self.memory_format = memory_format
        self.for_convolution = for_convolution
        # (pixel / 255 - mean) / std as one multiplication and one addition. The constants are computed in float32,
        # whatever type a precision plugin makes torch's default: in 16 bits each step would round again.
        spread = 255.0 * torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)
        means = 255.0 * torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.register_buffer("scale", 1.0 / spread, persistent=False)
        self.register_buffer("shift", -means / spread, persistent=False)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Normalise images `(N, 3, H, W)` if they are uint8. Others are assumed to be normalised."""
        images = images.contiguous(memory_format=self.memory_format)  # now, while a pixel is still one byte
        if images.dtype != torch.uint8:
            return images
        # The buffers have the dtype of the parameters, even if a precision plugin has converted the module.
        scaled = images * self.scale
        dtype = computing_type(scaled) if self.for_convolution else scaled.dtype
        if dtype is scaled.dtype:
            return scaled.add_(self.shift)
        if torch.compiler.is_compiling():  # which makes one kernel of it, and knows no `out` in channels_last
            return scaled.add(self.shift).to(dtype)
        # The sum is computed as above, and rounded as it is written, which saves writing and reading it in float32.
        return torch.add(scaled, self.shift, out=torch.empty_like(scaled, dtype=dtype))


class ImageClassifier(MeanOverLabels):
    """Trains a network as Goyal et al. 2017 (https://arxiv.org/abs/1706.02677) did, but with a cosine decay.

    Batches are `(images, labels)`. Images are either uint8 `(N, 3, H, W)`, normalised here on the device (to transfer a
    quarter of the bytes of float32), or floating point, assumed to be normalised. Labels are int64 `(N,)`, and -100 is
    ignored.

    The gradients are those of the mean over the labelled samples of all ranks and accumulated batches. It logs
    `train/loss` at every step, the mean over this rank's samples, label smoothing included. After an evaluation it logs
    `val/loss`, `val/top1` and `val/top5` (`test/...`) over all samples of all ranks, without label smoothing; samples
    that torch's DistributedSampler repeats count once.

    Args:
        network: maps normalised images `(N, 3, H, W)` to logits `(N, classes)`.
        learning_rate: for 256 samples per step; scaled linearly by the global batch.
        momentum: of SGD.
        nesterov: whether to use Nesterov momentum.
        weight_decay: not applied to parameters with one dimension: normalisations and biases.
        warmup_epochs: length of the linear warm-up; may be a fraction.
        label_smoothing: share of the target spread evenly over the classes, 0 to 1.
        mean: of each channel, for pixels from 0 to 1.
        std: standard deviation of each channel, for pixels from 0 to 1.
        channels_last: keep images and convolutions in NHWC, in which tensor cores compute.
        compile: `torch.compile` the network in place, so names in checkpoints stay as they are. The older way to have
            it compiled: `compile` of the strategy does so for any module, and leaves alone what is compiled already.
        fused: SGD takes a step in one kernel; None for ResNet50 on GPUs, see `models.optimizer.fused`.

    Raises:
        ValueError: `compile` with a network of one of torch's own classes, such as `nn.Sequential`.
    """

    def __init__(
        self,
        network: nn.Module,
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 5e-5,
        warmup_epochs: float = 5.0,
        label_smoothing: float = 0.1,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        channels_last: bool = False,
        compile: bool = False,  # noqa: A002 - Lightning's and torch's word for it
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["network"], logger=False)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.normalise = Normalisation(mean, std, memory_format, self._is_resnet(network))
        # torch annotates this overload of Module.to for tensors of four dimensions only.
        self.network: nn.Module = network.to(memory_format=memory_format)  # type: ignore[call-overload]
        if compile:
            # A call that starts in code of torch.nn is not traced: torch.compile would silently do nothing.
            if type(self.network).forward.__module__.startswith("torch.nn."):
                raise ValueError(
                    f"compile=True has no effect on a bare {type(self.network).__name__}. Give a network of a class of "
                    "your own, whose forward calls it, or leave compile=False."
                )
            self.network.compile()
        self.data_classes: int | None = None

    @override
    def setup(self, stage: str) -> None:
        """Read the number of classes from the data module, if it has one."""
        self.data_classes = getattr(getattr(self.trainer, "datamodule", None), "num_classes", None)

    def pipeline_layers(self) -> list[ChainLayer]:
        """Return normalisation and network as a chain, for a strategy that gives each rank a part of it.

        Raises:
            TypeError: the network has no `chain()`.
        """
        if not isinstance(self.network, Chained):
            raise TypeError(
                f"{type(self.network).__name__} cannot be cut into stages: it has no chain(), which names its layers "
                "in the order in which they follow one another, and their kinds. Add it, or use ResNet50."
            )
        names = [("normalise", "normalisation"), *((f"network.{name}", kind) for name, kind in self.network.chain())]
        return [ChainLayer(functools.partial(self.get_submodule, name), name, kind) for name, kind in names]

    def pipeline_batch(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer, and the labels for the loss."""
        images, labels = batch
        return images, labels

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Map images `(N, 3, H, W)`, uint8 or normalised, to logits `(N, classes)`.

        Raises:
            ValueError: the network has fewer outputs than the data module has classes.
        """
        logits = cast(Tensor, self.network(self.normalise(images)))
        if self.data_classes is not None and logits.shape[1] < self.data_classes:
            # On a GPU the loss would fail with a device-side assertion that names neither number.
            raise ValueError(
                f"The network has {logits.shape[1]} outputs, but the data has {self.data_classes} classes. "
                f"Build it with num_classes={self.data_classes}."
            )
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = mean_cross_entropy(self(images), labels, self.hparams["label_smoothing"])
        # A pipeline averages over micro-batches by this number. A tensor, as nothing is to wait for the GPU.
        self.log("train/loss", loss, batch_size=cast(int, (labels != IGNORED_LABEL).sum()))
        return self.weighed(loss, labels)

    @override
    def on_validation_epoch_start(self) -> None:
        # Not a buffer: a precision plugin may convert buffers to bfloat16, which counts only to 256.
        self._sums = torch.zeros(4, dtype=torch.float64, device=self.device)

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self._sums += evaluation_sums(self(images), labels)

    @override
    def on_validation_epoch_end(self) -> None:
        sums = cast(Tensor, self.trainer.strategy.reduce(self._sums, reduce_op="sum"))
        for name, value in evaluation_means(sums).items():
            # The same on every rank already. The maximum of equal numbers is exact; their mean may be rounded.
            self.log_evaluation(name, value, reduce_fx="max")

    on_test_epoch_start = on_validation_epoch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    @override
    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Return class probabilities, float32 or float64 `(N, classes)`, for images with or without labels."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return torch.softmax(at_least_float32(self(images)), dim=1)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return SGD with a peak learning rate of `learning_rate * global batch / 256`, which changes at every step."""
        trainer = self.trainer
        # Until this is done, neither the batch size nor the length of an epoch is known.
        # Trainer.estimated_stepping_batches does it too, but not if only max_steps is given.
        trainer.fit_loop.setup_data()
        self._warn_of_other_parameters()
        groups = recipe.decay_groups(self.network, self.hparams["weight_decay"])
        sgd = SGD(
            groups,
            lr=scaled_learning_rate(self.hparams["learning_rate"], recipe.global_batch(trainer)),
            momentum=self.hparams["momentum"],
            nesterov=self.hparams["nesterov"],
            fused=self._fused(groups),
        )
        recipe.keep_fused(sgd, trainer.precision)
        warmup = recipe.warmup_steps(trainer, self.hparams["warmup_epochs"])
        return {
            "optimizer": sgd,
            "lr_scheduler": recipe.warmup_cosine_schedule(sgd, warmup, recipe.total_steps(trainer)),
        }

    def _is_resnet(self, network: nn.Module) -> bool:
        """Whether it is known that a convolution alone reads the images, and that each parameter has a gradient."""
        return type(network) is ResNet50 and type(self) is ImageClassifier

    def _fused(self, groups: list[dict[str, Any]]) -> bool | None:
        chosen = self.hparams.get("fused")
        # torch's fused SGD fails at a parameter that has its first gradient in a later step.
        known = chosen is not None or self._is_resnet(self.network)
        return recipe.fused(SGD, groups, chosen, self.trainer.precision) if known else None

    def _warn_of_other_parameters(self) -> None:
        """Name the parameters that a subclass has added beside the network: only the network is optimized."""
        optimized = set(self.network.parameters())
        others = [name for name, each in self.named_parameters() if each.requires_grad and each not in optimized]
        if others:
            rank_zero_warn(
                f"{type(self).__name__}.configure_optimizers trains self.network, and not {len(others)} parameters "
                f"beside it: {', '.join(others[:3])}. Put them into the network, freeze them by requires_grad_(False), "
                "or return an optimizer of your own."
            )
