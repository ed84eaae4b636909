from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn.parameter import is_lazy

from azureml_strategy.models import GPTConfig, ImageClassifier, LanguageModel, ResNet50
from azureml_strategy.tracking.timing.flops import flops_of, gpu_peak_flops, peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16-mixed", 989.5),
        ("NVIDIA H100 80GB HBM3", "16-mixed", 989.4),
        ("NVIDIA H100 NVL", "bf16-true", 835.5),
        ("NVIDIA A100-SXM4-40GB", "bf16-mixed", 312),
        ("A100-SXM4-40GB", "bf16-mixed", 312),
        ("NVIDIA A100 80GB PCIe", "16-true", 312),
        ("Tesla V100-SXM2-32GB", "16-mixed", 125),
        ("Tesla V100-PCIE-16GB", "32-true", 14),
        ("Tesla T4", "16-mixed", 65),
        ("NVIDIA GB200", "bf16-mixed", 2500),
        ("AMD Instinct MI300X OAM", "bf16-mixed", 1307.4),
    ],
)
def test_gpus_of_azure(name: str, precision: str, tera: float) -> None:
    assert gpu_peak_flops(name, precision) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "tf32", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", True, 156),
        ("NVIDIA A100-SXM4-80GB", False, 19.5),
        ("Tesla V100-SXM2-16GB", True, 15.7),
        ("AMD Instinct MI300X", True, 163.4),
    ],
)
def test_float32_products_may_be_in_tf32(name: str, tf32: bool, tera: float) -> None:
    assert gpu_peak_flops(name, "32-true", tf32) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16-mixed"),
        ("NVIDIA A10-12Q", "bf16-mixed"),
        ("NVIDIA H300", "bf16-mixed"),
        ("", "bf16-mixed"),
        ("NVIDIA H200", "64-true"),
        ("NVIDIA H200", "transformer-engine"),
        ("Tesla V100-SXM2-32GB", "bf16-mixed"),
    ],
)
def test_what_nobody_has_said_has_no_peak(name: str, precision: str) -> None:
    assert gpu_peak_flops(name, precision) is None


@pytest.fixture
def highest() -> Iterator[None]:
    """As torch begins, whatever another test's training has set."""
    matmul = torch.backends.cuda.matmul
    if hasattr(torch.backends.cudnn, "conv"):
        before, matmul.fp32_precision = matmul.fp32_precision, "none"
        yield
        matmul.fp32_precision = before
    else:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        yield
        torch.set_float32_matmul_precision(precision)


@pytest.fixture
def precisions() -> Iterator[None]:
    """Torch's settings of float32, given back in the end."""
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [each.fp32_precision for each in backends]
    yield
    for each, was in zip(backends, before, strict=True):
        each.fp32_precision = was


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch 2.8 has the older setting only")
def test_torchs_newer_settings_of_float32_are_read(monkeypatch: pytest.MonkeyPatch, precisions: None) -> None:
    """After them, torch raises where one asks for the older ones."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert peak_flops(torch.device("cuda"), "32-true") == 494.7e12
    assert peak_flops(torch.device("cuda"), "32-true", convolutions=1.0) == pytest.approx(66.9e12)


@pytest.mark.parametrize(("convolutions", "tera"), [(0.0, 66.9), (1.0, 494.7), (0.5, 2 / (1 / 66.9 + 1 / 494.7))])
def test_convolutions_of_float32_are_in_tf32_by_default(
    convolutions: float, tera: float, monkeypatch: pytest.MonkeyPatch, highest: None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(torch.device("cuda"), "32-true", convolutions) == pytest.approx(tera * 1e12)


def test_the_part_of_convolutions_is_counted() -> None:
    flops = flops_of(ImageClassifier(ResNet50(10)))
    assert flops is not None
    flops(images(1, 64))
    assert 0.99 < flops.convolutions < 1
    transformer = flops_of(LanguageModel(SHAPE))
    assert transformer is not None
    assert transformer.convolutions == 0


class Stated(LightningModule):
    """Says its operations itself; nine tenths of its weights are of a convolution."""

    def make(self) -> None:
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.Flatten(), torch.nn.Linear(4, 1, bias=False)
        )

    def training_flops(self, batch: Any) -> float:
        return 1.0


def test_the_part_of_convolutions_is_that_of_the_whole_module() -> None:
    module = Stated()
    module.make()
    flops = flops_of(module)
    assert flops is not None
    module.layers = module.layers[1:]  # as a pipeline cuts it
    flops(None)
    assert flops.convolutions == pytest.approx(0.9)


@pytest.mark.parametrize("cut", [False, True])
def test_the_part_of_convolutions_that_configure_model_makes(cut: bool) -> None:
    class Late(Stated):
        def configure_model(self) -> None:
            self.make()

    module = Late()
    flops = flops_of(module)
    assert flops is not None
    module.configure_model()
    for each in module.parameters() if cut else ():  # as ZeRO-3 does
        each.ds_numel = each.numel()  # type: ignore[attr-defined]
        each.data = torch.empty(0)
    flops(None)
    assert flops.convolutions == pytest.approx(0.9)


def test_the_part_of_convolutions_of_lazy_layers() -> None:
    module = Stated()
    module.layers = torch.nn.Sequential(
        torch.nn.LazyConv2d(4, 3, bias=False), torch.nn.Flatten(), torch.nn.LazyLinear(1, bias=False)
    )
    module.unused = torch.nn.LazyLinear(1)
    flops = flops_of(module)
    assert flops is not None
    module.layers(torch.zeros(2, 1, 3, 3))
    flops(None)
    assert flops.convolutions == pytest.approx(0.9)


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu"), "32-true") is None


SHAPE = GPTConfig(vocab_size=100, context=64, layers=2, width=32, heads=2, mlp_width=64, tied=False)


def count(module: LightningModule, batch: Any) -> float:
    flops = flops_of(module)
    assert flops is not None
    return flops(batch)


def images(number: int, pixels: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(number, 3, pixels, pixels, dtype=torch.uint8), torch.zeros(number, dtype=torch.int64)


def test_resnet50_has_the_published_number() -> None:
    """4.089 G multiplications and additions forward, twice that backward, but no gradient of the images."""
    forward = 2 * 4.089e9
    first_layer = 2 * 112 * 112 * 64 * 3 * 7 * 7
    module = ImageClassifier(ResNet50(1000))
    assert count(module, images(2, 224)) / 2 == pytest.approx(3 * forward - first_layer, rel=1e-3)
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


def test_counted_once_for_each_shape_of_a_sample() -> None:
    flops = flops_of(ImageClassifier(ResNet50(10)))
    assert flops is not None
    assert flops(images(6, 32)) == 3 * flops(images(2, 32))
    assert flops(images(2, 64)) == pytest.approx(4 * flops(images(2, 32)), rel=0.01)


def test_the_formula_of_a_gpt_agrees_with_a_count() -> None:
    tokens = torch.zeros(4, 64, dtype=torch.int64)
    formula = count(LanguageModel(SHAPE), (tokens, tokens))
    assert formula == 4 * 64 * SHAPE.flops_per_token(64)

    class Counted(LanguageModel):
        training_flops = None  # type: ignore[assignment]  # hidden, so that torch counts

    counted = Counted(SHAPE)
    counted.configure_model()
    assert formula == pytest.approx(count(counted, (tokens, tokens)), rel=0.01)


class Own(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4, bias=False)

    def pipeline_batch(self, batch: dict[str, Tensor]) -> tuple[Any, Tensor]:
        return (batch["x"], batch["more"]), batch["y"]

    def forward(self, inputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.layer(inputs[0]), "more": inputs[1]}


BATCH = {"x": torch.zeros(5, 8), "more": torch.zeros(5), "y": torch.zeros(5)}


def test_inputs_and_outputs_may_be_nested() -> None:
    assert count(Own(), BATCH) == 2 * (2 * 5 * 8 * 4)  # forward and the weight's gradient; the inputs need none


def test_a_frozen_layer_has_no_gradient() -> None:
    module = Own()
    module.layer = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False).requires_grad_(False), module.layer)
    assert count(module, BATCH) == 2 * 5 * 8 * 8 + 2 * (2 * 5 * 8 * 4)


def test_lazy_layers_are_counted_and_stay_lazy() -> None:
    class Lazy(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(4, bias=False))

        def pipeline_batch(self, batch: Tensor) -> tuple[Tensor, None]:
            return batch, None

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs)

    module = Lazy()
    # Forward, the weight's gradient, and that of what the normalization gives.
    assert count(module, torch.zeros(5, 8)) == 3 * (2 * 5 * 8 * 4)
    assert all(map(is_lazy, module.parameters()))


def test_a_forward_pass_that_looks_at_values_gives_none() -> None:
    class Looks(Own):
        def forward(self, inputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return super().forward(inputs) if inputs[0].sum() > 0 else {}

    with pytest.warns(UserWarning, match=r"No MFU: the forward pass of Looks .* Give it a training_flops"):
        assert count(Looks(), BATCH) == 0


def test_a_module_that_gives_nothing_to_go_by() -> None:
    assert flops_of(LightningModule()) is None
