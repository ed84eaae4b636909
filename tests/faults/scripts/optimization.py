"""Scripts that optimize in other ways than one optimizer's step after each batch."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, GradientAccumulationScheduler
from tests.faults.scripts.common import FEATURES, HIDDEN, Regressor, Training, train_loader, training
from torch import Tensor, nn


class GAN(LightningModule):
    """Manual optimization of two networks in turns, as in Lightning's tutorial."""

    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))
        self.discriminator = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.3),
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, 1),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        first, second = self.optimizers()
        z = torch.randn(len(real), self.latent).type_as(real)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        judge = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(first)
        generator_loss = judge(self.discriminator(self(z)), ones)
        self.log("g_loss", generator_loss)
        first.zero_grad()
        self.manual_backward(generator_loss)
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        real_loss = judge(self.discriminator(real), ones)
        fake_loss = judge(self.discriminator(self(z).detach()), zeros)
        discriminator_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", discriminator_loss)
        second.zero_grad()
        self.manual_backward(discriminator_loss)
        second.step()
        self.untoggle_optimizer(second)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        z = torch.linspace(-1, 1, self.latent).repeat(4, 1)
        self.log("val_loss", self.discriminator(self(z)).mean().abs(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        second = torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        decays = [torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.8) for each in (first, second)]
        return [first, second], decays


def gan() -> Training:
    made = training(GAN())
    made.strategy = {"find_unused_parameters": True}
    return made


class Newton(Regressor):
    """Several closures a step; without dropout, of which LBFGS makes nothing."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3, history_size=4)


def lbfgs() -> Training:
    made = training(Newton())
    made.train = train_loader(drop_last=True)
    return made


class Compiled(Regressor):
    """Its network, not the module: this torch cannot compile Lightning's `log`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.compile(self.network, backend="aot_eager")


def compiled() -> Training:
    made = training(Compiled())
    made.train = train_loader(drop_last=True)  # another shape would be compiled once more
    return made


def accumulation() -> Training:
    """15 batches, two a step: the last one of an epoch is a step of its own."""
    return training(accumulate_grad_batches=2, gradient_clip_val=0.5)


def accumulation_schedule() -> Training:
    return training(None, GradientAccumulationScheduler({0: 1, 1: 2, 2: 4}))


class Pretrained(Regressor):
    """A backbone that stays as it is in the first epoch, and then learns more slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.network[:5]
        self.head = self.network[5:]
        del self.network

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))

    def configure_optimizers(self) -> Any:
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(trainable, lr=self.learning_rate)


def finetuning() -> Training:
    return training(Pretrained(), BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.1))
