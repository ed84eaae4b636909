"""Networks that are described by a module, a name or counts."""

from __future__ import annotations

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
