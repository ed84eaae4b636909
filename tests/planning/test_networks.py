"""Networks that are described by a module, a name or counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from azureml_strategy.planning import PlanError, named_network, network_of_counts, network_of_module
from azureml_strategy.planning.networks import unit_name


class _Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        hidden = batch[0]
        for layer in self.layers:
            hidden = torch.relu(layer(hidden))
        loss = nn.functional.cross_entropy(self.head(hidden), batch[1])
        self.log("loss", loss)
        return {"loss": loss}


def _batch() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)


def test_a_lightning_module_is_described_by_its_training_step(recwarn: pytest.WarningsRecorder) -> None:
    with torch.device("meta"):
        network = network_of_module(_Classifier(), _batch(), samples=4)
    assert (network.name, network.parameters, network.family) == ("_Classifier", 3 * 72 + 18, "transformer")
    assert [(unit.name, unit.elements) for unit in network.units] == [
        *(("layers.0", 72), ("layers.1", 72), ("layers.2", 72), ("", 18)),
    ]
    assert network.flops == pytest.approx(6 * (3 * 64 + 16) - 2 * 64, rel=0.01)  # the first needs no gradient of inputs
    assert not [each for each in recwarn if "self.log" in str(each.message)]


def test_a_module_with_numbers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"layers\.0\.weight is not on the meta device"):
        network_of_module(_Classifier(), _batch(), samples=4)


def test_a_module_that_needs_numbers_is_said_to() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, rows: Tensor) -> Tensor:
            return self.linear(rows) if rows.sum().item() > 0 else rows

    with torch.device("meta"), pytest.raises(PlanError, match="Asks cannot be tried on tensors without numbers"):
        network_of_module(Asks(), torch.zeros(2, 2), samples=2)


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, rows: Tensor, scale: Tensor) -> Tensor:
        return self.linear(rows) * scale  # type: ignore[no-any-return]


def test_a_dictionary_is_given_by_names() -> None:
    with torch.device("meta"):
        module, batch = _Named(), {"scale": torch.zeros(1), "rows": torch.zeros(2, 4)}
    assert network_of_module(module, batch, samples=2).flops == 2 * 2 * 4 * 4  # rows need no gradient


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (nn.ReLU, "ReLU has no parameter that trains"),
        (lambda: nn.Linear(4, 4).requires_grad_(False), "Linear has no parameter that trains"),
        (lambda: nn.Embedding(9, 4, sparse=True), "Embedding has sparse gradients"),
    ],
)
def test_what_cannot_be_described_is_said(make: Callable[[], nn.Module], says: str) -> None:
    with torch.device("meta"), pytest.raises(PlanError, match=says):
        network_of_module(make(), torch.zeros(2, 4), samples=2)


class _Adapted(nn.Module):
    """Blocks of which only a narrow layer beside the frozen one trains, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"frozen": nn.Linear(32, 32).requires_grad_(False), "down": nn.Linear(32, 1)})
            for _ in range(3)
        )
        self.layers[1]["down"].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer["frozen"](hidden) + layer["down"](hidden)  # type: ignore[index, operator]
        return hidden  # type: ignore[no-any-return]


def test_units_know_frozen_parameters_and_who_needs_them_backward() -> None:
    with torch.device("meta"):
        network = network_of_module(_Adapted(), torch.zeros(2, 8, dtype=torch.long), samples=2)
    block = 32 * 32 + 32 + 32 + 1
    found = [(unit.name, unit.elements, unit.trained) for unit in network.units]
    assert found == [("", 512, 0), ("layers.0", block, 33), ("layers.1", block, 0), ("layers.2", block, 33)]
    embedding, first, middle, last = network.units
    assert embedding.done == -1  # nothing before it trains
    assert network.operators.backward_from <= last.done < middle.done <= first.done
    assert network.parameters == 2 * 33


def test_counts_scale_a_network_of_the_family() -> None:
    like = named_network("resnet50")
    twice = network_of_counts(parameters=2 * like.parameters, flops=2 * like.flops, name="twice")
    assert twice.flops == pytest.approx(2 * like.flops)
    assert twice.parameters == pytest.approx(2 * like.parameters, rel=1e-3)
    assert twice.name == "twice"
    with pytest.raises(PlanError, match="computes nothing"):
        network_of_counts(parameters=0, flops=1e9)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match="Known: resnet50"):
        named_network("resnet18")
    assert named_network("ViT-B-16") is named_network("ViT-B-16")
    assert named_network("vit_b_16").parameters == 86_567_656  # torchvision's vit_b_16


@pytest.mark.parametrize(
    ("parameter", "unit"),
    [("layers.3.mlp.up.weight", "layers.3"), ("layer1.0.conv1.weight", "layer1.0"), ("fc.bias", "")],
)
def test_units_are_blocks(parameter: str, unit: str) -> None:
    assert unit_name(parameter) == unit
