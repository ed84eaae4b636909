"""Training loops as users of Fabric write them, each with one thing that a strategy may not expect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.fabric import Fabric
from tests.situations.modules import BATCHES, FEATURES, GLOBAL_BATCH, WIDTH, Block, Mixture
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

STEPS = 2 * BATCHES
# Trains by the batches, and returns the module, or what else is to be compared.
Loop = Callable[[Fabric, list[Tensor]], Any]


class Network(nn.Module):
    """Blocks that learn the sum of a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(FEATURES), Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, states: Tensor, without: int | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            states = block(states) if index != without else states
        return self.head(states)

    def predict(self, states: Tensor) -> Tensor:
        return torch.tanh(self.head(self.blocks[2](self.blocks[1](self.blocks[0](states)))))

    def sharded_blocks(self) -> Iterable[nn.Module]:
        return list(self.blocks)

    def tensor_parallel_plan(self) -> dict[str, str]:
        return {"blocks.0.linear": "colwise_gather_output"}


class SharedLayer(Network):
    """Two of its blocks end in the same layer, and two have the same weight."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks[1] = nn.Sequential(self.blocks[1], shared)
        self.blocks[2] = nn.Sequential(self.blocks[2], shared)


class SharedParameter(Network):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].linear.weight = self.blocks[1].linear.weight


class Scalar(Network):
    """A parameter without a dimension, as CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, states: Tensor, without: int | None = None) -> Tensor:
        return super().forward(states, without) * self.temperature


class StepsItself(Network):
    """Has a method that computes the loss and goes backward."""

    fabric: Fabric

    def learn(self, rows: Tensor) -> Tensor:
        loss = loss_of(self(rows), rows)
        self.fabric.backward(loss)
        return loss.detach()


def batches(replica: int, replicas: int) -> list[Tensor]:
    """The replica's part of the same rows in each step."""
    rows = torch.randn(GLOBAL_BATCH * STEPS, FEATURES, generator=torch.Generator().manual_seed(7))
    return [each[replica::replicas] for each in rows.split(GLOBAL_BATCH)]


def loss_of(outputs: Tensor, rows: Tensor) -> Tensor:
    return (outputs.squeeze(1) - rows.sum(1)).pow(2).mean()


def sgd(parameters: Iterable[nn.Parameter], rate: float = 0.05) -> Optimizer:
    return torch.optim.SGD(parameters, lr=rate)


def step(fabric: Fabric, optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()


def plain(fabric: Fabric, rows: list[Tensor], made: Callable[[], nn.Module] = Network) -> nn.Module:
    module = made()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for each in rows:
        step(fabric, optimizer, loss_of(model(each), each))
    return module


def apart(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """Sets up the module first, then the optimizer."""
    module = Network()
    model = fabric.setup_module(module)
    optimizer = fabric.setup_optimizers(sgd(model.parameters()))
    for each in rows:
        step(fabric, optimizer, loss_of(model(each), each))
    return module


def accumulation(fabric: Fabric, rows: list[Tensor], without: Callable[[int], int | None] = lambda _: None) -> Any:
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for index, each in enumerate(rows):
        ends = index % 3 == 2
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(loss_of(model(each, without(index)), each) / 3)
        if ends:
            optimizer.step()
            optimizer.zero_grad()
    return module


def accumulation_with_skips(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """The last batch of a step leaves out a block."""
    return accumulation(fabric, rows, lambda index: 1 if index % 3 == 2 else None)


def accumulation_in_each(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """Accumulates without telling Fabric."""
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for index, each in enumerate(rows):
        fabric.backward(loss_of(model(each), each) / 3)
        if index % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return module


def backward_twice(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """Two forward passes, then two backward passes."""
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for each in rows:
        optimizer.zero_grad()
        first, second = loss_of(model(each), each), model(-each).pow(2).mean()
        fabric.backward(first)
        fabric.backward(0.5 * second)
        optimizer.step()
    return module


def skips_a_block(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for index, each in enumerate(rows):
        step(fabric, optimizer, loss_of(model(each, 1 if index % 2 else None), each))
    return module


def _changes(freezes: bool) -> Loop:
    def loop(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
        module = Network()
        module.blocks.requires_grad_(freezes)
        model, optimizer = fabric.setup(module, sgd(module.parameters()))
        for index, each in enumerate(rows):
            if index == 3:
                module.blocks.requires_grad_(not freezes)
            step(fabric, optimizer, loss_of(model(each), each))
        return module

    return loop


def _adversaries(toggles: bool, own_order: bool = False) -> Loop:
    def loop(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
        makes = Network()
        judges: Any = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        judges.sharded_blocks = lambda: []
        judges.tensor_parallel_plan = dict
        generator, of_generator = fabric.setup(makes, sgd(makes.parameters()))
        critic, of_critic = fabric.setup(judges, sgd(judges.parameters()))
        for each in rows:
            if own_order:  # one pass of the generator for both
                made = generator(each)
            for trains in (False, True) if own_order else (True, False):
                if toggles:
                    makes.requires_grad_(trains)
                    judges.requires_grad_(not trains)
                made = made if own_order else generator(each)
                if trains:
                    of_generator.zero_grad()
                    fabric.backward(functional.softplus(-critic(made)).mean(), model=generator)
                    of_generator.step()
                else:
                    of_critic.zero_grad()
                    true, false = critic(each.sum(1, keepdim=True)), critic(made.detach())
                    fabric.backward(functional.softplus(-true).mean() + functional.softplus(false).mean(), model=critic)
                    of_critic.step()
        return nn.ModuleList([makes, judges])

    return loop


def two_optimizers(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    module = Network()
    made = sgd(module.blocks.parameters()), sgd(module.head.parameters(), 0.02)
    model, *optimizers = fabric.setup(module, *made)
    for each in rows:
        for optimizer in optimizers:
            optimizer.zero_grad()
        fabric.backward(loss_of(model(each), each))
        for optimizer in optimizers:
            optimizer.step()
    return module


def adds_layer(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """A layer of its own, which each rank draws by itself, beside the module."""
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    layer: nn.Module = nn.Identity()
    for index, each in enumerate(rows):
        if index == 3:
            torch.manual_seed(fabric.global_rank)
            layer = nn.Linear(1, 1, device=fabric.device)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.03})
        step(fabric, optimizer, loss_of(layer(model(each)), each))
    return nn.ModuleList([module, layer])


def adds_adapter(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """A layer that the module has from then on."""
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for index, each in enumerate(rows):
        if index == 3:
            torch.manual_seed(fabric.global_rank)
            adapter = nn.Linear(1, 1, device=fabric.device)
            module.head = nn.Sequential(module.head, adapter)
            optimizer.add_param_group({"params": list(adapter.parameters()), "lr": 0.03})
        step(fabric, optimizer, loss_of(model(each), each))
    return module


def optimizer_of_its_own(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """Learns the weights of two losses, which are in no module, by an optimizer made later."""
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    weights = nn.Parameter(torch.full((2,), 0.1 * fabric.global_rank, device=fabric.device))
    of_weights = fabric.setup_optimizers(sgd([weights]))
    for each in rows:
        of_weights.zero_grad()
        outputs = model(each)
        losses = torch.stack([loss_of(outputs, each), outputs.pow(2).mean()])
        step(fabric, optimizer, (losses * torch.exp(-weights) + weights).sum())
        of_weights.step()
    module.register_parameter("weights", weights)
    return module


def marked_method(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    model.mark_forward_method("predict")
    for each in rows:
        step(fabric, optimizer, loss_of(model.predict(each), each))
    return module


def method_with_backward(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    module = StepsItself()
    module.fabric = fabric
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    model.mark_forward_method("learn")
    for each in rows:
        optimizer.zero_grad()
        model.learn(each)
        optimizer.step()
    return module


def _layers(through: Callable[[Any], Any]) -> Loop:
    def loop(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
        module = Network()
        model, optimizer = fabric.setup(module, sgd(module.parameters()))
        for each in rows:
            of = through(model)
            states = of.blocks[2](of.blocks[1](of.blocks[0](each)))
            step(fabric, optimizer, loss_of(of.head(states), each))
        return module

    return loop


def layers_beside_forward(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """A pass of the module and one of a layer in one loss, then one of layers alone."""
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for each in rows:
        optimizer.zero_grad()
        fabric.backward(loss_of(model(each), each) + module.blocks[0](each).pow(2).mean())
        fabric.backward(module.blocks[0](-each).pow(2).mean())
        optimizer.step()
    return module


def evaluates(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """Looks at its outputs between the backward pass and the step, without gradients, and changes weights by hand."""
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for each in rows:
        optimizer.zero_grad()
        fabric.backward(loss_of(model(each), each))
        with torch.no_grad():
            model(each)
        optimizer.step()
        with torch.no_grad():
            model(each)
            for parameter in module.parameters():
                parameter.mul_(0.99)
    return module


def own_backward(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """Calls `backward` of the loss itself."""
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for each in rows:
        optimizer.zero_grad()
        loss_of(model(each), each).backward()
        optimizer.step()
    return module


def experts(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    """A pass by Fabric, then one of a layer by its loss itself, and a norm that torch clips."""
    module = Network()
    module.blocks[0] = Mixture()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), 0.01, weight_decay=0.5))
    for each in rows:
        optimizer.zero_grad()
        fabric.backward(loss_of(model(each), each))
        module.blocks[0](each).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        optimizer.step()
        if fabric.global_rank == 0:  # what one rank looks at by itself
            weight = torch.ones(FEATURES, device=each.device, requires_grad=True)
            (each * weight).sum().backward()
    return module


def setup_twice(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    module = Network()
    for part in (rows[:3], rows[3:]):
        model, optimizer = fabric.setup(module, sgd(module.parameters()))
        for each in part:
            step(fabric, optimizer, loss_of(model(each), each))
    return module


def _average(of: Callable[[Any], Any], late: bool, sets_up: bool = False) -> Loop:
    def loop(fabric: Fabric, rows: list[Tensor]) -> Any:
        module = Network()
        average: Any = None if late else AveragedModel(module, avg_fn=get_ema_avg_fn(0.5))
        model, optimizer = fabric.setup(module, sgd(module.parameters()))
        if late:
            average = AveragedModel(of(model), avg_fn=get_ema_avg_fn(0.5))
        if sets_up:
            average.sharded_blocks = lambda: list(average.module.blocks)
            average.tensor_parallel_plan = lambda: {"module.blocks.0.linear": "colwise_gather_output"}
            fabric.setup_module(average)
        for each in rows:
            step(fabric, optimizer, loss_of(model(each), each))
            average.update_parameters(of(model))
        return nn.ParameterList(average.parameters())

    return loop


def _lbfgs(rate: float, line_search: str | None = None) -> Loop:
    def loop(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
        module = Network()
        optimizer = torch.optim.LBFGS(module.parameters(), lr=rate, max_iter=4, line_search_fn=line_search)
        model, optimizer = fabric.setup(module, optimizer)
        for each in rows[:3]:  # more steps of a line search differ by rounding

            def closure(each: Tensor = each) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model(each), each)
                fabric.backward(loss)
                return loss

            optimizer.step(closure)
        return module

    return loop


def closure(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
    module = Network()
    model, optimizer = fabric.setup(module, sgd(module.parameters()))
    for each in rows:

        def once(each: Tensor = each) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(each), each)
            fabric.backward(loss)
            return loss

        optimizer.step(once)
    return module


def _clipping(skips: bool = False, **how: Any) -> Loop:
    def loop(fabric: Fabric, rows: list[Tensor]) -> nn.Module:
        module = Network()
        model, optimizer = fabric.setup(module, sgd(module.parameters()))
        for each in rows:
            optimizer.zero_grad()
            fabric.backward(loss_of(model(each, 1 if skips else None), each))
            fabric.clip_gradients(model, optimizer, **how)
            optimizer.step()
        return module

    return loop


def _of(made: Callable[[], nn.Module]) -> Loop:
    return lambda fabric, rows: plain(fabric, rows, made)


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "apart": apart,
    "accumulation": accumulation,
    "accumulation_with_skips": accumulation_with_skips,
    "accumulation_in_each": accumulation_in_each,
    "backward_twice": backward_twice,
    "skips_a_block": skips_a_block,
    "unfreezes": _changes(freezes=False),
    "freezes": _changes(freezes=True),
    "adversaries": _adversaries(toggles=True),
    "adversaries_without_toggles": _adversaries(toggles=False),
    "adversaries_of_one_pass": _adversaries(toggles=False, own_order=True),
    "two_optimizers": two_optimizers,
    "adds_layer": adds_layer,
    "adds_adapter": adds_adapter,
    "optimizer_of_its_own": optimizer_of_its_own,
    "marked_method": marked_method,
    "method_with_backward": method_with_backward,
    "layers_of_the_module": _layers(lambda model: model.module),
    "layers_through_the_wrapper": _layers(lambda model: model),
    "layers_beside_forward": layers_beside_forward,
    "evaluates": evaluates,
    "own_backward": own_backward,
    "experts": experts,
    "shared_layer": _of(SharedLayer),
    "shared_parameter": _of(SharedParameter),
    "scalar_parameter": _of(Scalar),
    "setup_twice": setup_twice,
    "average_made_before": _average(lambda model: model.module, late=False),
    "average_made_after": _average(lambda model: model.module, late=True),
    "average_of_the_wrapper": _average(lambda model: model, late=True),
    "average_set_up": _average(lambda model: model.module, late=False, sets_up=True),
    "lbfgs": _lbfgs(0.1),
    "line_search": _lbfgs(1.0, "strong_wolfe"),
    "closure": closure,
    "clips_norm": _clipping(max_norm=0.3),
    "clips_largest": _clipping(max_norm=0.1, norm_type=float("inf")),
    "clips_value": _clipping(clip_val=0.01),
    "clips_with_skips": _clipping(skips=True, max_norm=0.3),
}
