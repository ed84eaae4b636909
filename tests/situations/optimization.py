"""Training in other ways than one backward pass of `self(rows)` a step, of parameters that train from the start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback
from tests.situations.modules import WIDTH, Mixture, Regression, Situation, WeighedMixture
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer


class LayersCalled(Regression):
    """Its step calls its layers, never itself."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        states = batch[0]
        for block in self.blocks:
            states = block(states)
        return self.loss(self.head(states), batch[0])


class AsksDevice(Regression):
    """Moves its batch to where its first parameter is."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        first = next(self.parameters())
        return super().training_step([batch[0].to(first.device, first.dtype)], batch_idx)


class OwnParameter(LayersCalled):
    """Has a parameter of its own beside its layers, which its step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        states = batch[0]
        for block in self.blocks:
            states = block(states) * self.scale
        return self.loss(self.head(states), batch[0])


class Manual(Regression):
    """Optimizes manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.make_gradients(batch[0])
        optimizer.step()

    def make_gradients(self, rows: Tensor) -> None:
        self.manual_backward(self.loss(self(rows), rows))


class ManualLayers(OwnParameter):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ManualWithoutBlocks(ManualLayers):
    """Its step calls layers, of which no strategy knows."""

    sharded_blocks: Any = None


class ClampsGradients(ManualWithoutBlocks):
    """Clamps its gradients as soon as they are there."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-0.01, 0.01)


class ManualTwoLosses(ManualLayers):
    """Two losses of layers that it calls, each with a backward pass of its own, then one step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        first, second = (LayersCalled.training_step(self, [each], batch_idx) for each in (batch[0], -batch[0]))
        self.manual_backward(first)
        self.manual_backward(0.5 * second)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return self.optimizer([*self.blocks.parameters(), *self.head.parameters()])


class TogglesInStep(Manual):
    """Freezes its head inside of a step, by the module."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.global_step == 2:
            self.head.requires_grad_(False)
        super().training_step(batch, batch_idx)


class EvaluatesInStep(Manual):
    """Looks at its outputs after each step, without gradients."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.head.bias.mul_(1.0)  # a change of the weights by hand
            states = self.blocks[0](batch[0])
            self.seen = self.head(self.blocks[2](self.blocks[1].linear(states)))


class ManualTwice(Manual):
    """Two backward passes before a step."""

    def make_gradients(self, rows: Tensor) -> None:
        super().make_gradients(rows)
        self.manual_backward(0.5 * self(rows).pow(2).mean())


class ManualDiscards(Manual):
    """Looks at the gradients of another loss, and throws them away."""

    def make_gradients(self, rows: Tensor) -> None:
        self.manual_backward(10 * self(-rows).pow(2).mean())
        self.optimizers().zero_grad()
        super().make_gradients(rows)


class ManualAccumulation(Manual):
    """A step after three batches."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(self(batch[0]), batch[0]) / 3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class ManualClipping(Manual):
    def make_gradients(self, rows: Tensor) -> None:
        super().make_gradients(rows)
        self.clip_gradients(self.optimizers(), gradient_clip_val=0.3, gradient_clip_algorithm="norm")


class TwoOptimizers(Manual):
    """One optimizer for the blocks, one for the head; both step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(self.loss(self(batch[0]), batch[0]))
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [self.optimizer(self.blocks.parameters()), self.optimizer(self.head.parameters(), 0.02)]


class Adversaries(Manual):
    """Two networks, of which each trains in turn while the other's parameters are toggled off."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        generator, critic = self.optimizers()
        target = batch[0].sum(1, keepdim=True)
        self.toggle_optimizer(generator)
        made = self(batch[0])
        self.manual_backward(functional.softplus(-self.critic(made)).mean())
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        false = functional.softplus(self.critic(self(batch[0]).detach())).mean()
        self.manual_backward(functional.softplus(-self.critic(target)).mean() + false)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)

    def configure_optimizers(self) -> Any:
        generator = [*self.blocks.parameters(), *self.head.parameters()]
        return [self.optimizer(generator), self.optimizer(self.critic.parameters())]


class AdversariesWithoutToggles(Adversaries):
    """Leaves all parameters trainable: each network's step has gradients for the other's, or none."""

    def toggle_optimizer(self, optimizer: Any) -> None:
        optimizer.zero_grad()

    def untoggle_optimizer(self, optimizer: Any) -> None:
        pass


class OwnBackward(Manual):
    """Calls `backward` of the loss itself."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Experts(Regression):
    """Each row goes through an expert of its own: in some steps one process has no row for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Mixture()


class WeighedExperts(Regression):
    """All processes call all experts in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = WeighedMixture()


class ExpertsByHand(Experts, Manual):
    """Goes backward in two ways before a step."""

    def make_gradients(self, rows: Tensor) -> None:
        super().make_gradients(rows)
        (0.5 * self.blocks[0](rows).pow(2).mean()).backward()
        self.clip_gradients(self.optimizers(), 0.3, "norm")


class ExpertsDecay(Experts):
    """Its optimizer moves what has a gradient of zeros, and leaves what has none."""

    def optimizer(self, parameters: Iterable[Any], rate: float = 0.01) -> Optimizer:
        return torch.optim.AdamW(parameters, rate, weight_decay=0.5)


class SkipsABlock(Regression):
    """Leaves out a block in every second step, and the last one in all of the first epoch."""

    def forward(self, states: Tensor) -> Tensor:
        states = self.blocks[0](states)
        if self.global_step % 2:
            states = self.blocks[1](states)
        return self.head(self.blocks[2](states) if self.current_epoch else states)


class UnfreezesInStep(Regression):
    """Unfreezes its blocks inside of a step, and freezes its head inside of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.global_step == 2:
            self.blocks.requires_grad_(True)
        if self.global_step == 4:
            self.head.requires_grad_(False)
        return super().training_step(batch, batch_idx)


class FreezesInAccumulation(Regression):
    """Freezes its head between two batches of one step, whose optimizer has the head's first gradient."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.head.requires_grad_(batch_idx == 0)


class LineSearch(Regression):
    """Its optimizer decides by the loss how often it runs the closure."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=4, line_search_fn="strong_wolfe")


class ClosureOfMany(Regression):
    """Its optimizer runs the closure several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4)


class OwnOptimizerStep(Regression):
    """Steps after every second batch only, by `optimizer_step`."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Siamese(Regression):
    """Two passes through the same layers in a step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(self(batch[0]) - 0.1 * self(-batch[0]), batch[0])


class Unfreezes(Regression):
    """Its blocks train from the second epoch on, and are in the optimizer from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks.requires_grad_(True)


class Freezes(Regression):
    """Its first block no longer trains from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[0].requires_grad_(False)


class Alternates(Regression):
    """Trains its blocks in one step, its head in the next."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.blocks.requires_grad_(batch_idx % 2 == 0)
        self.head.requires_grad_(batch_idx % 2 == 1)


class AddsGroup(Regression):
    """Gives the optimizer a group of parameters in the second epoch, which have had gradients before."""

    def configure_optimizers(self) -> Any:
        return self.optimizer([*self.blocks[0].parameters(), *self.head.parameters()])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            added = [*self.blocks[1].parameters(), *self.blocks[2].parameters()]
            self.trainer.optimizers[0].add_param_group({"params": added, "lr": 0.02})


class AddsLayer(Regression):
    """Makes a layer in the second epoch, and gives it to the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter: nn.Module | None = None

    def forward(self, states: Tensor) -> Tensor:
        for block in self.blocks:
            states = block(states)
        return self.head(states if self.adapter is None else states + self.adapter(states))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(self.global_rank)  # DDP would give all ranks the weights of the first
            self.adapter = nn.Linear(WIDTH, WIDTH, device=self.device)
            torch.manual_seed(0)
            with torch.no_grad():
                self.adapter.weight.normal_(std=0.1)
                self.adapter.bias.zero_()
            self.trainer.optimizers[0].add_param_group({"params": self.adapter.parameters()})


class Backbone(Regression):
    """As Lightning's BackboneFinetuning wants it: a backbone that it freezes, and a head."""

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.head.parameters())


def finetuning() -> dict[str, Any]:
    callback = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, lambda_func=lambda _: 1.0, backbone_initial_ratio_lr=0.4
    )
    return {"callbacks": [callback]}


class UnfreezesOne(BaseFinetuning):
    """A user's own finetuning: the last block in the second epoch."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.blocks)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[2], optimizer, lr=0.02)


class HeadOnly(Regression):
    def configure_optimizers(self) -> Any:
        return self.optimizer(each for each in self.parameters() if each.requires_grad)


class NewHead(Callback):
    """Draws the head anew before the first step, as transfer learning does."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.manual_seed(11)
        with torch.no_grad():
            for parameter in pl_module.head.parameters():
                parameter.normal_(std=0.2)


class AuxiliaryLoss(LayersCalled):
    """Its loss has a penalty on its weights, taken outside of any forward pass."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        penalty = sum((each.pow(2).sum() for each in self.parameters()), torch.zeros(()))
        return super().training_step(batch, batch_idx) + 0.01 * penalty


SITUATIONS: dict[str, Situation] = {
    "plain": Situation(Regression),
    "layers_called": Situation(LayersCalled),
    "asks_device": Situation(AsksDevice),
    "own_parameter": Situation(OwnParameter),
    "clamps_gradients": Situation(ClampsGradients),
    "manual": Situation(Manual),
    "manual_layers": Situation(ManualLayers),
    "manual_without_blocks": Situation(ManualWithoutBlocks),
    "manual_two_losses": Situation(ManualTwoLosses),
    "toggles_in_step": Situation(TogglesInStep),
    "evaluates_in_step": Situation(EvaluatesInStep),
    "manual_twice": Situation(ManualTwice),
    "manual_accumulation": Situation(ManualAccumulation),
    "manual_discards": Situation(ManualDiscards),
    "manual_clipping": Situation(ManualClipping),
    "two_optimizers": Situation(TwoOptimizers),
    "adversaries": Situation(Adversaries),
    "adversaries_without_toggles": Situation(AdversariesWithoutToggles),
    "own_backward": Situation(OwnBackward),
    "experts": Situation(Experts),
    "weighed_experts": Situation(WeighedExperts),
    "experts_by_hand": Situation(ExpertsByHand),
    "experts_decay": Situation(ExpertsDecay),
    "skips_a_block": Situation(SkipsABlock),
    "unfreezes_in_step": Situation(UnfreezesInStep),
    "freezes_in_accumulation": Situation(FreezesInAccumulation, lambda: {"accumulate_grad_batches": 3}),
    "line_search": Situation(LineSearch),
    "closure_of_many": Situation(ClosureOfMany),
    "own_optimizer_step": Situation(OwnOptimizerStep),
    "accumulation": Situation(Regression, lambda: {"accumulate_grad_batches": 3}),
    "accumulation_layers": Situation(LayersCalled, lambda: {"accumulate_grad_batches": 3}),
    "clipping": Situation(Regression, lambda: {"gradient_clip_val": 0.3}),
    "siamese": Situation(Siamese),
    "unfreezes": Situation(Unfreezes),
    "freezes": Situation(Freezes),
    "alternates": Situation(Alternates),
    "adds_group": Situation(AddsGroup),
    "adds_layer": Situation(AddsLayer),
    "backbone_finetuning": Situation(Backbone, finetuning),
    "own_finetuning": Situation(HeadOnly, lambda: {"callbacks": [UnfreezesOne()]}),
    "new_head": Situation(Regression, lambda: {"callbacks": [NewHead()]}),
    "auxiliary_loss": Situation(AuxiliaryLoss),
    "fit_twice": Situation(Regression, fits=2),
    "layers_called_fit_twice": Situation(LayersCalled, fits=2),
    "unfreezes_fit_twice": Situation(Unfreezes, fits=2),
}
