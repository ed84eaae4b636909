"""The modules of the matrix: each has one thing that a strategy or a precision may not bear.

All of them are chains, so that each trains whole, in shards and in stages. They are tiny: what is asked is whether
numbers agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from azureml_strategy.models import ChainLayer
from azureml_strategy.models.chain import build_chain, seeded

CLASSES, FEATURES, WIDTH, PIXELS, TOKENS, LENGTH, HEADS = 4, 8, 16, 8, 16, 6, 2
GLOBAL_BATCH, STEPS = 16, 4  # rows of a step over all replicas, and optimizer steps


class Standardised(nn.Module):
    """Subtracts a mean and divides by a deviation, as half of all networks for images do."""

    mean: Tensor
    std: Tensor

    def __init__(self) -> None:
        super().__init__()
        # No number of bfloat16, so that a buffer that was rounded shows.
        self.register_buffer("mean", torch.linspace(0.301, 0.499, FEATURES))
        self.register_buffer("std", torch.linspace(0.901, 1.299, FEATURES))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows - self.mean) / self.std


class ChannelsLast(nn.Module):
    """Two convolutions whose weights and images lie in memory by pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, WIDTH, 3), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 3), nn.Tanh())
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        states: Tensor = self.layers(images.contiguous(memory_format=torch.channels_last))
        return states.mean((2, 3))


class RotaryAttention(nn.Module):
    """Attention whose angles are buffers that are not saved."""

    cosines: Tensor
    sines: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH).float(), 10000 ** -(torch.arange(half) / half)).repeat(1, 2)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        states = self.norm(hidden)
        query, key, value = (
            matrix(states).unflatten(-1, (HEADS, -1)).transpose(1, 2) for matrix in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            self._turned(query), self._turned(key), value, is_causal=True
        )
        return hidden + self.mixed(attended.transpose(1, 2).flatten(2))

    def _turned(self, states: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        turned = states * self.cosines + torch.cat((-second, first), -1) * self.sines
        return turned.type_as(states)


class Compiled(nn.Module):
    """A layer that compiles itself where it is made."""

    def __init__(self, inputs: int, backend: str) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, WIDTH)
        self.compile(backend=backend)

    def forward(self, rows: Tensor) -> Tensor:
        return functional.gelu(self.linear(rows)).tanh()


class Tied(nn.Linear):
    """An output matrix that is the embedding's, with a bias, as a pipeline's stage needs a parameter of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, TOKENS)
        nn.init.normal_(self.weight, std=0.3)


def _embedding() -> nn.Module:
    embedding = nn.Embedding(TOKENS, WIDTH)
    nn.init.normal_(embedding.weight, std=0.3)
    return embedding


def _dense(inputs: int = WIDTH, *before: nn.Module) -> nn.Module:
    return nn.Sequential(*before, nn.Linear(inputs, WIDTH), nn.Tanh())


def _normalised() -> nn.Module:
    """Statistics over the batch, and over each image; both are kept."""
    return nn.Sequential(
        *(nn.Conv2d(3, WIDTH, 3), nn.BatchNorm2d(WIDTH), nn.Tanh()),
        *(nn.Conv2d(WIDTH, WIDTH, 3), nn.InstanceNorm2d(WIDTH, affine=True, track_running_stats=True), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(WIDTH * (PIXELS - 4) ** 2, WIDTH), nn.Tanh()),
    )


Make = Callable[[], nn.Module]


def drawn_on_cpu(make: Make) -> nn.Module:
    """Make a module whose parameters are drawn on the CPU, wherever they lie.

    A GPU draws other numbers of the same seed, and `configure_model` makes modules on it under some strategies only.
    """

    def by(name: str) -> Callable[..., Tensor]:
        draw = getattr(torch.Tensor, name)

        def drawn(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
            if tensor.is_meta:
                return tensor
            # ZeRO-3 makes tensors of 16 bits; some processors draw other numbers in these than in float32.
            return tensor.copy_(draw(torch.empty(tensor.shape, device="cpu").float(), *arguments, **options))

        return drawn

    with patch.multiple(torch.Tensor, uniform_=by("uniform_"), normal_=by("normal_")):
        return make()


def _models(backend: str) -> dict[str, tuple[Make, ...]]:
    head: Make = partial(nn.Linear, WIDTH, CLASSES)
    return {
        # Its first layer meets the batch in float32, and no autocast of a CPU casts what that layer reads.
        "plain": (lambda: _dense(FEATURES, nn.LayerNorm(FEATURES)), _dense, head),
        "batch_norm": (_normalised, head),
        "buffer": (lambda: _dense(FEATURES, Standardised()), head),
        "rotary": (_embedding, RotaryAttention, partial(nn.Linear, WIDTH, TOKENS)),
        "tied": (_embedding, _dense, Tied),
        "convolution": (ChannelsLast, head),
        "compiled": (partial(Compiled, FEATURES, backend), partial(Compiled, WIDTH, backend), head),
    }


MODELS = tuple(_models("eager"))
_OF_TOKENS, _OF_IMAGES = ("rotary", "tied"), ("batch_norm", "convolution")


class Cell(LightningModule):
    """Trains one of the models on numbers of its own, and notes the loss of each step.

    Args:
        model: one of `MODELS`.
        backend: of torch.compile, for the model that is compiled.
    """

    def __init__(self, model: str, backend: str) -> None:
        super().__init__()
        self.model, self.backend = model, backend
        self.layers = nn.ModuleList()
        self.losses: list[Tensor] = []

    def pipeline_layers(self) -> list[ChainLayer]:
        makes = _models(self.backend)[self.model]
        ties = {0: "embedding", len(makes) - 1: "embedding"} if self.model == "tied" else {}
        return [
            ChainLayer(seeded(partial(drawn_on_cpu, make), 5, index), str(index), "layer", ties.get(index))
            for index, make in enumerate(makes)
        ]

    def pipeline_batch(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return batch[0], batch[1]

    def sharded_blocks(self) -> Iterable[nn.Module]:
        return [self.layers[1]] if len(self.layers) > 2 else []

    def configure_model(self) -> None:
        if not self.layers:
            self.layers.extend(build_chain(self.pipeline_layers()))

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = layer(states)
        return states

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach().float())

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.4, momentum=0.5)

    def float_buffers(self) -> dict[str, dict[str, Any]]:
        """Running statistics and constants, as this rank has them."""
        return {
            name: {"values": buffer.detach().double().flatten().tolist(), "type": str(buffer.dtype)}
            for name, buffer in self.named_buffers()
            if buffer.is_floating_point()
        }

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = self.pipeline_batch(batch)
        return functional.cross_entropy(self(inputs).float().flatten(0, -2), targets.flatten())


def batches(model: str, replicas: int) -> DataLoader[tuple[Tensor, ...]]:
    """The same rows in each of `STEPS` steps, in batches of a replica: a class is where its rows lie, with noise."""
    random, tokens = torch.Generator().manual_seed(7), model in _OF_TOKENS
    if tokens:
        inputs = torch.randint(TOKENS, (GLOBAL_BATCH, LENGTH), generator=random)
        targets = (inputs + 1) % TOKENS
    else:
        targets = torch.arange(GLOBAL_BATCH) % CLASSES
        shape = (3, PIXELS, PIXELS) if model in _OF_IMAGES else (FEATURES,)
        middles = 2 * torch.randn(CLASSES, *shape, generator=random)
        inputs = middles[targets] + torch.randn(GLOBAL_BATCH, *shape, generator=random)
    rows = TensorDataset(inputs.repeat(STEPS, *[1] * (inputs.ndim - 1)), targets.repeat(STEPS, *[1] * tokens))
    return DataLoader(rows, batch_size=GLOBAL_BATCH // replicas)
