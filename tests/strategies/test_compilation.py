"""compile=blocks and compile=whole of a LightningModule under DDP, and what is not compiled."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.compile import from_compiled
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from torchmetrics import MeanMetric

from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLDeepSpeedStrategy, AzureMLModelParallelStrategy
from azureml_strategy.strategies.compilation.parts import find_blocks
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.process_group import end_process_group

Loader = DataLoader[tuple[torch.Tensor, ...]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(torch.relu(self.up(inputs)))


class Wide(Block):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)


class Counting(Block):
    """Its number is part of the graph."""

    calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs) * (1 + self.calls / 1000)


class Branching(Block):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.up(inputs)
        if hidden.sum() > 0:  # this line cuts the graph
            hidden = hidden * 2
        return self.down(hidden)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.norm(self.layer(inputs))


class Net(LightningModule):
    """Some blocks between two layers; it keeps its losses."""

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(kind() for kind in kinds or (Block, Block, Block))
        self.mean = MeanMetric()
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.mean.update(loss.detach())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Plain(Net):
    """Has no forward: a step calls its network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        del self.first, self.last, self.blocks
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.network(batch[0]).mean(-1, keepdim=True), batch[1])
        self.losses.append(loss.item())
        return loss


class Adversaries(LightningModule):
    """Two networks that train in turn, by hand; the first has two backward passes through one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.makes, self.judges = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        makes, judges = self.optimizers()
        made = self.makes(batch[0])
        self.manual_backward(self.judges(made).mean(), retain_graph=True)
        self.manual_backward(made.pow(2).mean())
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
        loss = self.judges(batch[0]).pow(2).mean() - self.judges(made.detach()).mean()
        self.manual_backward(loss)
        judges.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(each.parameters(), 0.05) for each in (self.makes, self.judges)]


class Penalised(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs = batch[0].requires_grad_()
        (slope,) = torch.autograd.grad(self(inputs).sum(), inputs, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean()


class FailsLater(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ArithmeticError("mine")
        return super().training_step(batch, batch_idx)


class Experts(Net):
    """Its loop cannot be compiled, and calls blocks with as many samples as fall to each."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        outputs = torch.zeros_like(hidden)
        for index, block in enumerate(self.blocks):
            chosen = (hidden.argmax(1) % len(self.blocks) == index).nonzero()[:, 0]  # of a size that depends on data
            outputs = outputs.index_add(0, chosen, block(hidden[chosen]))
        return self.last(outputs)


class Reads(Net):
    """Torch compiles no LSTM."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.network(self.first(inputs))[0])


class ReadsInStep(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.network(batch[0])[0].mean(-1, keepdim=True), batch[1])
        self.losses.append(loss.item())
        return loss


class Shortens(Plain):
    """Its sequences have another length in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        kept = 2 + batch_idx % 4
        return super().training_step((batch[0][:, :kept].contiguous(), batch[1][:, :kept]), batch_idx)


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No graphs of an earlier test; aot_eager, which traces as inductor does and makes no C++."""
    before = torch.compiler.get_default_backend()
    torch._dynamo.reset()
    torch.compiler.set_default_backend("aot_eager")
    monkeypatch.chdir(tmp_path)
    with patch.dict(os.environ):  # Lightning writes ranks there
        yield
    end_process_group()
    torch.compiler.set_default_backend(before)
    torch._dynamo.reset()


def loader(samples: int = 32, *shape: int) -> Loader:
    inputs = torch.randn(samples, *(shape or (4,)), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(inputs, inputs.sum(-1, keepdim=True)), 8)


def fitted(make: Callable[[], Any], how: Any, data: Loader, callbacks: Any = (), **settings: Any) -> tuple[Any, int]:
    """Fit a module that has the same weights each time; return it with the number of graphs."""
    seed_everything(1, verbose=False)
    module = make()
    graphs = counters["stats"]["unique_graphs"]
    trainer = Trainer(
        strategy=AzureMLDDPStrategy(compile=how),
        **{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_progress_bar": False},
        **{"enable_model_summary": False, "callbacks": list(callbacks)},
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        **settings,
    )
    trainer.fit(module, data, loader(11))
    return module, counters["stats"]["unique_graphs"] - graphs


def said(record: pytest.WarningsRecorder) -> list[str]:
    words = (
        "compiled again",
        "could not be compiled",
        "compiled part is cut",
        "fits none",
        "compiled nothing",
        "so far",
        "nothing that has gradients",
    )
    return [text for each in record if any(word in (text := str(each.message)) for word in words)]


def is_plain(module: nn.Module) -> bool:
    return all(each._compiled_call_impl is None for each in module.modules())


TRANSFORMER = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
CASES: dict[str, tuple[Callable[[], Any], Loader, int, int]] = {
    # how to make it, its data, and the graphs of training in blocks and as a whole; an evaluation has as many
    "one kind": (Net, loader(), 1, 1),
    "two kinds": (lambda: Net(Block, Block, Normed, Normed), loader(), 2, 1),
    "a smaller last batch": (Net, loader(29), 1, 1),
    "one sample in the last batch": (Net, loader(25), 1, 1),
    "nn.Sequential": (lambda: Plain(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))), loader(), 1, 1),
    # A layer comes first, for all blocks to have inputs with gradients. Others would need a graph of their own.
    "nn.TransformerEncoder": (
        lambda: Plain(nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoder(TRANSFORMER, 2))),
        *(loader(32, 5, 4), 1, 1),
    ),
    "lengths that vary": (lambda: Shortens(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))), loader(30, 6, 4), 2, 2),
    "by hand": (Adversaries, loader(), 2, 2),
}


@pytest.mark.parametrize("how", ["blocks", "whole"])
@pytest.mark.parametrize("case", CASES)
def test_it_trains_as_uncompiled_with_one_graph_for_each_kind(
    case: str, how: str, recwarn: pytest.WarningsRecorder
) -> None:
    make, data, *expected = CASES[case]
    eager, none = fitted(make, "off", data, limit_val_batches=0)
    compiled, graphs = fitted(make, how, data, limit_val_batches=0)
    assert none == 0
    assert graphs == expected[how == "whole"]
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-6)
    assert said(recwarn) == []


def test_an_evaluation_has_a_graph_of_its_own_and_names_nothing(recwarn: pytest.WarningsRecorder) -> None:
    eager, _ = fitted(Net, "off", loader(29))
    compiled, graphs = fitted(Net, "blocks", loader(29))
    assert graphs == 2
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-6)
    assert said(recwarn) == []


@pytest.mark.parametrize(
    "callback",
    [WeightAveraging, lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1), lambda: ModelCheckpoint(".")],
)
def test_callbacks_that_copy_weights(callback: Callable[[], Callback]) -> None:
    eager, _ = fitted(Net, "off", loader(), [callback()])
    compiled, _ = fitted(Net, "blocks", loader(), [callback()])
    for name, value in eager.state_dict().items():
        assert torch.allclose(compiled.state_dict()[name], value, atol=1e-6)
    saved = torch.load(next(Path().glob("*.ckpt")))["state_dict"] if list(Path().glob("*.ckpt")) else eager.state_dict()
    assert saved.keys() == Net().state_dict().keys()


class Copies(Callback):
    """Copies and pickles the module while it is compiled."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *rest: Any) -> None:
        assert not is_plain(pl_module)
        inputs = torch.ones(2, 4)
        for copied in (copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))):
            assert is_plain(copied)
            assert torch.equal(copied(inputs), pl_module(inputs))
            torch.nn.utils.vector_to_parameters(torch.zeros(1000), copied.parameters())
            assert not copied(inputs).any()  # it computes with its own weights
        assert list(pl_module.state_dict()) == list(Net().state_dict())


class Keeping(Block):
    """Keeps all attributes, as LightningModule does, where nn.Module leaves out what compiles its call."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


@pytest.mark.parametrize("kind", [Block, Keeping])
@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_copies_and_pickles_are_uncompiled_and_so_is_the_module_after_the_fit(how: str, kind: type[nn.Module]) -> None:
    module, _ = fitted(lambda: Net(kind, kind, kind), how, loader(), [Copies()])
    assert is_plain(module)


def test_a_second_fit_and_an_evaluation_beside() -> None:
    module, _ = fitted(Net, "blocks", loader())
    trainer = module.trainer
    trainer.validate(module, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(), loader(11))
    assert len(module.losses) == 12
    assert is_plain(module)


def test_an_error_takes_everything_off_again() -> None:
    module = FailsLater()
    with pytest.raises(ArithmeticError, match="mine"):
        fitted(lambda: module, "blocks", loader())
    assert is_plain(module)
    assert not torch._dynamo.config.suppress_errors


def test_a_gradient_penalty_is_told_what_to_do() -> None:
    with pytest.raises(RuntimeError) as raised:
        fitted(Penalised, "blocks", loader(), limit_val_batches=0)
    assert "Train with compile=off" in "".join(raised.value.__notes__)


def test_what_a_user_has_compiled_stays_as_it_is() -> None:
    own = Net()
    own.blocks[0].compile(backend="eager")
    kept = own.blocks[0]._compiled_call_impl
    fitted(lambda: own, "blocks", loader())
    assert own.blocks[0]._compiled_call_impl is kept
    assert own.blocks[1]._compiled_call_impl is None

    used: list[int] = []
    wrapped = Net()
    wrapped.blocks[0] = torch.compile(wrapped.blocks[0], backend=lambda graph, inputs: used.append(1) or graph)
    fitted(lambda: wrapped, "blocks", loader(), limit_val_batches=0)
    assert used == [1]


def test_a_module_that_a_user_has_compiled_as_a_whole() -> None:
    eager, _ = fitted(Net, "off", loader(), limit_val_batches=0)
    compiled, _ = fitted(lambda: from_compiled(torch.compile(Net(), backend="eager")), "blocks", loader(), [])
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-6)


def test_a_backend_that_fails_is_named_once_and_it_trains_uncompiled() -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such luck")

    eager, _ = fitted(Net, "off", loader())
    torch.compiler.set_default_backend(fails)
    with pytest.warns(UserWarning, match=r"`Block` could not be compiled.*no such luck") as record:
        compiled, _ = fitted(Net, "blocks", loader())
    assert len(said(record)) == 1
    assert compiled.losses == eager.losses


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: AzureMLDeepSpeedStrategy(stage=3, compile="whole"), "compile='blocks', which gathers each block"),
        (lambda: AzureMLModelParallelStrategy(compile="whole"), "compile='blocks'"),
    ],
    ids=["ZeRO-3", "FSDP2"],
)
def test_what_gathers_parameters_between_parts_is_not_compiled_as_a_whole(
    make: Callable[[], object], instead: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"compile='whole' has one graph.*{instead}"):
        make()


def test_zero_3_says_that_it_compiles_nothing_of_a_module_without_blocks() -> None:
    strategy = AzureMLDeepSpeedStrategy(stage=3, compile="blocks")
    strategy._lightning_module = Plain(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    with pytest.warns(UserWarning, match=r"compiles nothing: Plain repeats no part.*sharded_blocks.*stage=2"):
        assert [*strategy.trained_networks()] == []
    strategy._lightning_module = Net()
    assert [*strategy.trained_networks()] == [strategy._lightning_module]


class InThreads(Callback):
    """Calls a block in threads at once, for the first time in a training."""

    def __init__(self) -> None:
        self.same: list[bool] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step:
            return
        block, inputs = pl_module.blocks[0], torch.ones(8, 8)
        with patch.object(block, "_compiled_call_impl", None), torch.no_grad():
            expected = block(inputs)

        slowly = block.register_forward_pre_hook(lambda *_: time.sleep(0.01))

        def call(_: int) -> None:
            for _ in range(5):
                with torch.no_grad():
                    self.same.append(torch.allclose(block(inputs), expected))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(call, range(4)))
        slowly.remove()
        assert "forward" not in vars(block)


@pytest.mark.parametrize("backend", ["aot_eager", "fails"])
def test_a_part_that_threads_call_is_the_plain_one_afterwards(backend: str) -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such luck")

    eager, _ = fitted(Net, "off", loader(), limit_val_batches=0)
    torch.compiler.set_default_backend(fails if backend == "fails" else backend)
    called = InThreads()
    with pytest.warns(UserWarning, match="no such luck") if backend == "fails" else nullcontext():
        compiled, _ = fitted(Net, "blocks", loader(), [called], limit_val_batches=0)
    assert called.same == [True] * 20
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-6)


class CallsForward(Net):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first.forward(inputs)
        for block in self.blocks:
            hidden = block.forward(hidden)
        return self.last.forward(hidden)


SILENT = {
    "a mode": (Net, lambda: FlopCounterMode(display=False), "_FlopCounterMode is on"),
    "the variable": (Net, lambda: torch._dynamo.config.patch(disable=True), "TORCH_COMPILE_DISABLE=1"),
    "a stance": (Net, lambda: torch.compiler.set_stance("force_eager"), r"torch.compiler.set_stance.* is in force"),
    "forward": (CallsForward, nullcontext, "the steps have called none of these parts"),
}


@pytest.mark.parametrize("silent", SILENT)
def test_that_nothing_is_compiled_is_said_once_with_the_reason(silent: str) -> None:
    make, context, reason = SILENT[silent]
    sentence = f"compile=blocks has compiled nothing in 2 steps: {reason}"
    with context(), pytest.warns(UserWarning, match=sentence) as record:
        _, graphs = fitted(make, "blocks", loader(64), limit_val_batches=0)
    assert graphs == 0
    assert len(said(record)) == 1


def test_a_cut_graph_is_one_sentence_with_the_line() -> None:
    line = next(n for n, each in enumerate(Path(__file__).read_text().splitlines(), 1) if "# this line cuts" in each)
    with pytest.warns(UserWarning, match=rf"cut at .*test_compilation\.py:{line} \(") as record:
        compiled, _ = fitted(lambda: Net(Branching, Branching), "blocks", loader(), limit_val_batches=0)
    assert len(said(record)) == 1
    assert compiled.losses == fitted(lambda: Net(Branching, Branching), "off", loader())[0].losses


def test_parts_that_a_cut_forward_calls_have_graphs_of_their_own(recwarn: pytest.WarningsRecorder) -> None:
    def messages(make: Callable[[], Net]) -> list[str]:
        recwarn.clear()
        compiled, _ = fitted(make, "whole", loader(64), limit_val_batches=0)
        assert compiled.losses == fitted(make, "off", loader(64), limit_val_batches=0)[0].losses
        return said(recwarn)

    (of_layer,) = messages(lambda: ReadsInStep(nn.LSTM(4, 8)))
    assert "cut at `LSTM` (" in of_layer
    (of_line,) = messages(Experts)
    assert f"({__file__}:" in of_line
    (of_line,) = messages(lambda: Reads(nn.LSTM(8, 8)))
    assert f"({__file__}:" in of_line


def test_a_number_that_changes_is_named_once_and_not_compiled_for_ever() -> None:
    def make() -> Net:
        return Net(Counting, Counting)

    eager, _ = fitted(make, "off", loader(120), limit_val_batches=0)
    with pytest.warns(UserWarning, match=r"`Counting` was compiled again in step 3: .*__self__\.calls == 1") as record:
        compiled, graphs = fitted(make, "blocks", loader(120), limit_val_batches=0)
    again, given_up = said(record)
    assert "make it a tensor" in again
    assert "From now on" in given_up
    assert graphs <= 12 < len(compiled.losses)
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-6, nan_ok=True)


class Scaled(Block):
    """Each has a number of its own, which is part of its graph."""

    made = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1 - next(self.made) / 1000

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.scale * self.down(torch.relu(self.up(inputs)))


class Cache:
    """Keeps what it is given, as in the generation of a text."""

    kept = torch.empty(0, 8)

    def add(self, inputs: torch.Tensor) -> torch.Tensor:
        self.kept = torch.cat([self.kept, inputs])
        return self.kept


class Remembering(Block):
    def forward(self, inputs: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        return super().forward(inputs if cache is None else cache.add(inputs).mean(0, keepdim=True))


class Generates(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        cache, hidden = Cache(), self.first(batch[0][:1])
        for _ in range(12):
            hidden = self.blocks[0](hidden, cache)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Net(*[Scaled] * 10), r"`Scaled` has .* graphs so far.*__self__\.scale"),
        (lambda: Generates(Remembering, Remembering), r"`Remembering` has .* graphs so far.*kept.*size mismatch"),
    ],
    ids=["blocks that differ in a number", "an evaluation with a cache that grows"],
)
def test_many_graphs_of_a_kind_are_named_once(make: Callable[[], Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=reason) as record:
        fitted(make, "blocks", loader(64))
    assert len(said(record)) == 1


def test_kinds_of_one_class_have_several_graphs_each_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    widths = [width for width in (16, 24, 32, 40, 48) for _ in range(2)]
    fitted(lambda: Net(*[functools.partial(Wide, width) for width in widths]), "blocks", loader(29))
    assert said(recwarn) == []


class Teaches(Block):
    """Its parameters train, as far as they know, and it has no gradients."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return super().forward(inputs)


class TimesZero(Block):
    """torch's inductor takes what this returns for what it keeps, and loses the gradients."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(inputs)
        self.seen = hidden.detach()
        return hidden + inputs * 0


@pytest.mark.parametrize(
    ("backend", "block"),
    [("aot_eager", Teaches), pytest.param("inductor", TimesZero, marks=pytest.mark.exhaustive)],
)
def test_a_block_without_gradients_is_named_once(
    backend: str, block: type[Block], recwarn: pytest.WarningsRecorder
) -> None:
    torch.compiler.set_default_backend(backend)
    fitted(lambda: Net(block, block, Block), "blocks", loader())
    (warning,) = [each for each in said(recwarn) if "has gradients" in each]
    assert warning.startswith(f"`{block.__name__}` returns nothing that has gradients, though its parameters train.")


class Watches(Callback):
    """Watches a layer inside of one of several equal blocks, from before the fit or from its third step on."""

    def __init__(self, begins: int) -> None:
        self.begins, self.seen = begins, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.begins:
            pl_module.blocks[1].up.register_forward_hook(self._see)

    def _see(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.seen += layer.training
        return output * 2


@pytest.mark.parametrize("begins", [0, 3])
@pytest.mark.parametrize("how", ["blocks", "whole"])
def test_hooks_inside_of_a_block_are_called(how: str, begins: int) -> None:
    plain, watched = Watches(begins), Watches(begins)
    eager, _ = fitted(Net, "off", loader(), [plain])
    compiled, _ = fitted(Net, how, loader(), [watched])
    assert watched.seen == plain.seen == 8 - begins
    assert compiled.losses == pytest.approx(eager.losses, abs=1e-6)


def test_lengths_that_were_seen_vary_after_a_thaw_too() -> None:
    class Thaws(Shortens):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.network[0].layer.weight.requires_grad_(self.global_step >= 8)

    def make() -> Thaws:
        return Thaws(nn.Sequential(*(Normed() for _ in range(2))))

    _, graphs = fitted(make, "blocks", loader(64, 6, 8), limit_val_batches=0)
    assert graphs <= 6, "one for the first length and one for all lengths, of each kind, and of what trains less"


def test_a_sampler_that_does_not_know_its_length() -> None:
    class Sampler(torch.utils.data.SequentialSampler):
        def __len__(self) -> int:
            raise NotImplementedError

    data = DataLoader(loader().dataset, 8, sampler=Sampler(loader().dataset))
    module, _ = fitted(Net, "blocks", data, limit_train_batches=3, use_distributed_sampler=False)
    assert len(module.losses) == 6


@pytest.mark.parametrize(
    "how", [{"accumulate_grad_batches": 2}, {"callbacks": [GradientAccumulationScheduler({0: 2})]}]
)
def test_graphs_are_not_replayed_over_accumulated_gradients(how: Any) -> None:
    strategy = AzureMLDDPStrategy(compile="blocks", compile_mode="reduce-overhead")
    with pytest.raises(ConfigurationError, match="overwrite the gradients"):
        Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=2, logger=False, **how).fit(Net(), loader())


def test_two_networks_are_no_blocks_and_experts_are_no_blocks() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList([Block(), Block()])

    pupils = nn.ModuleDict({"pair": Pair(Block, Block)})
    assert find_blocks(pupils) == [*pupils["pair"].student, *pupils["pair"].teacher]
    mixtures = nn.ModuleList([Mixture(), Mixture()])
    assert find_blocks(mixtures) == [*mixtures]


class Pair(nn.Module):
    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.student, self.teacher = (nn.Sequential(*(kind() for kind in kinds)) for _ in range(2))


def test_metrics_and_single_layers_are_no_blocks() -> None:
    module = Net()
    assert find_blocks(module) == list(module.blocks)
    assert find_blocks(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), MeanMetric(), MeanMetric()])) == []


@pytest.mark.parametrize(("given", "means"), [(True, "blocks"), (False, "off"), (None, "off"), ("whole", "whole")])
def test_the_words_and_what_yaml_makes_of_them(given: Any, means: str) -> None:
    assert AzureMLDDPStrategy(compile=given)._compilation.how == means


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"compile": "bloks"}, "none of blocks, whole and off"),
        ({"compile": "blocks", "compile_mode": "fast"}, "compile_mode='fast' is none of"),
        ({"compile_mode": "reduce-overhead"}, "no effect without compile"),
    ],
)
def test_words_that_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        AzureMLDDPStrategy(**arguments)


def test_without_a_compiler_it_says_so_once_and_trains(tmp_path: Path) -> None:
    """In a process of its own, as torch looks for a compiler once."""
    environ = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [
        sys.executable,
        "-c",
        "from tests.strategies.test_compilation import without_a_compiler; without_a_compiler()",
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "No working C++ compiler" in done.stdout


def without_a_compiler() -> None:
    eager, _ = fitted(Net, "off", loader())
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        compiled, graphs = fitted(Net, "blocks", loader())
    assert compiled.losses == eager.losses
    assert graphs == 0
    (text,) = [str(each.message) for each in record if "could not be compiled" in str(each.message)]
    print(text)
