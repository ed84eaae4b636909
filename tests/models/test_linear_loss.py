"""The loss in chunks against the loss of logits: values, gradients, memory, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from azureml_strategy.models import linear_loss
from azureml_strategy.models.evaluation import mean_cross_entropy
from azureml_strategy.models.gpt import OutputLayer
from azureml_strategy.models.linear_loss import linear_cross_entropy, takes_chunks, whole_tiles

CLASSES, WIDTH, TOKENS = 61, 8, 100
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_FEW_LOGITS", 0)
    monkeypatch.setattr(linear_loss, "_CHUNK", {"cpu": 24})


@pytest.fixture(params=["whole tiles", "as it is"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_TILED", {"cpu"} if request.param == "whole tiles" else set())


def data(dtype: torch.dtype = torch.float32, ignored: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a matrix, and targets of which some in the middle are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, TOKENS // 4, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(CLASSES, WIDTH, generator=generator).to(dtype)
    targets = torch.randint(CLASSES, (4, TOKENS // 4), generator=generator)
    targets.view(-1)[30 : 30 + ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def of_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return mean_cross_entropy(functional.linear(hidden, weight).flatten(0, 1), targets.flatten())


def gradients(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor, factor: float = 1.0) -> list[Tensor]:
    value = loss(hidden, weight, targets)
    return [value.detach(), *torch.autograd.grad(value * factor, (hidden, weight))]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ignored", [0, 20, 70])
def test_it_is_the_loss_of_the_logits(dtype: torch.dtype, ignored: int) -> None:
    found = gradients(linear_cross_entropy, *data(dtype, ignored), factor=3.0)
    torch.testing.assert_close(found, gradients(of_logits, *data(dtype, ignored), factor=3.0), rtol=1e-6, atol=1e-6)


def test_without_a_target_it_is_zero_and_so_are_its_gradients() -> None:
    hidden, weight, targets = data()
    for value in gradients(linear_cross_entropy, hidden, weight, torch.full_like(targets, -100)):
        assert not value.any()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("kind", ["autocast", "weights"])
def test_in_16_bits_it_is_no_less_exact(kind: str) -> None:
    """Than the loss of logits, both against float64: the loss stays in float32, and so do sums of gradients."""
    precise = gradients(of_logits, *data(torch.float64))

    def errors(loss: Loss) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            found = gradients(loss, *data(torch.float32 if kind == "autocast" else torch.bfloat16))
        assert found[0].dtype is torch.float32
        pairs = zip(found, precise, strict=True)
        return [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]

    for ours, theirs in zip(errors(linear_cross_entropy), errors(of_logits), strict=True):
        assert ours < 1.1 * theirs + 1e-5


def test_padded_columns_are_masked_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit."""
    monkeypatch.setattr(linear_loss, "_TILED", {"cpu"})
    monkeypatch.setattr(linear_loss, "_CHUNK", {"cpu": TOKENS})
    hidden, weight, targets = data()
    padded = whole_tiles(weight, weight.dtype)
    assert padded.shape == (64, WIDTH)
    logits = functional.linear(hidden, padded).flatten(0, 1)
    masked = torch.where(torch.arange(64) < CLASSES, logits, -torch.inf)
    assert torch.equal(linear_cross_entropy(hidden, weight, targets), mean_cross_entropy(masked, targets.flatten()))
    layer = OutputLayer(WIDTH, CLASSES, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
        assert layer(hidden).shape == (4, TOKENS // 4, CLASSES)
        torch.testing.assert_close(layer(hidden), functional.linear(hidden, weight), rtol=1e-6, atol=1e-6)


def test_two_backward_passes_give_twice_the_gradients() -> None:
    hidden, weight, targets = data()
    once = gradients(of_logits, hidden, weight, targets)[1:]
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close([hidden.grad / 2, weight.grad / 2], once, rtol=1e-6, atol=1e-6)


def test_derivatives_of_gradients_are_refused() -> None:
    hidden, weight, targets = data()
    with pytest.raises(RuntimeError, match=r"create_graph=True.*module.pipeline_loss\(module\(inputs\), targets\)"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_has_no_gradient(frozen: int) -> None:
    tensors = data()
    tensors[frozen].requires_grad_(False)
    linear_cross_entropy(*tensors).backward()
    expected = gradients(of_logits, *data())[1:][1 - frozen]
    assert tensors[frozen].grad is None
    torch.testing.assert_close(tensors[1 - frozen].grad, expected, rtol=1e-6, atol=1e-6)


def test_an_evaluation_keeps_nothing() -> None:
    hidden, weight, targets = data()
    with torch.inference_mode():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss.clone(), of_logits(hidden, weight, targets).detach(), rtol=1e-6, atol=0)


def test_targets_of_another_shape_are_refused() -> None:
    hidden, weight, targets = data()
    with pytest.raises(ValueError, match=r"\(4, 25, 8\) have no targets \(4, 24\)"):
        linear_cross_entropy(hidden, weight, targets[:, 1:])


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("target", [CLASSES, CLASSES + 1, -1])
@pytest.mark.parametrize("few_logits", [0, 2**24], ids=["chunks", "logits"])
def test_a_target_that_is_no_class_is_an_error(target: int, few_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows were added to the matrix: their probability is zero, so the loss would be infinite in silence."""
    monkeypatch.setattr(linear_loss, "_FEW_LOGITS", few_logits)
    hidden, _, targets = data()
    targets[2, 3] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        OutputLayer(WIDTH, CLASSES, bias=False)(hidden, targets)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("few_logits", [0, 2**24], ids=["chunks", "logits"])
def test_a_bias_that_a_user_has_added_counts(few_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "_FEW_LOGITS", few_logits)
    hidden, _, targets = data()
    layer = OutputLayer(WIDTH, CLASSES, bias=False)
    layer.bias = nn.Parameter(torch.linspace(-2, 2, CLASSES))
    loss = layer(hidden, targets)
    assert torch.equal(loss, mean_cross_entropy(layer(hidden).flatten(0, 1), targets.flatten()))
    loss.backward()
    assert layer.bias.grad.any()


@pytest.mark.parametrize(
    ("tokens", "classes", "dtype", "expected"),
    [
        (1024, 50257, torch.bfloat16, True),
        (1024, 256, torch.bfloat16, False),  # few logits
        (400, 50257, torch.bfloat16, False),  # fewer than the weights
        (1024, 50257, torch.float16, False),  # GradScaler's factor comes later
    ],
)
def test_chunks_are_for_many_logits(
    tokens: int, classes: int, dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    weight, targets = torch.empty(classes, 256, device="meta"), torch.empty(tokens, dtype=torch.int64, device="meta")
    assert takes_chunks(weight.to(dtype), targets) is expected


def test_under_float16_gradients_are_as_exact_as_before() -> None:
    """Small ones are multiplied before they are rounded: the layer computes the loss of the logits."""
    hidden, weight, targets = data()
    layer = OutputLayer(WIDTH, CLASSES, bias=False)
    layer.weight = nn.Parameter(weight.detach().clone())

    def run(loss: Loss, matrix: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.float16):
            return list(torch.autograd.grad(loss(hidden, matrix, targets) * 2.0**16, (hidden, matrix)))

    found = run(lambda states, _, labels: layer(states, labels), layer.weight)
    assert all(torch.equal(one, other) for one, other in zip(found, run(of_logits, weight), strict=True))


def test_it_keeps_less_than_half_of_what_logits_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """With GPT-2's vocabulary, counted in the tensors that autograd saves."""
    monkeypatch.undo()
    layer = OutputLayer(32, 50257, bias=False)
    hidden = torch.randn(2, 256, 32, requires_grad=True)
    targets = torch.randint(50257, (2, 256))

    def saved(loss: Callable[[], Tensor]) -> int:
        storages: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            value = loss()
        assert value.requires_grad
        return sum(storages.values())

    assert saved(lambda: layer(hidden, targets)) < 0.5 * saved(lambda: of_logits(hidden, layer.weight, targets))


def test_it_compiles_without_a_break() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    torch._dynamo.reset()
    layer = OutputLayer(WIDTH, CLASSES, bias=False)
    hidden, _, targets = data()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.autograd.backward([compiled(hidden, targets), compiled(hidden, targets)])
    assert counters["stats"]["unique_graphs"] == 1
    found, hidden.grad = [hidden.grad / 2, layer.weight.grad / 2], None
    expected = gradients(of_logits, hidden, layer.weight, targets)[1:]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
