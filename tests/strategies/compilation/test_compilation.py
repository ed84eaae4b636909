"""compile=blocks and compile=whole of a LightningModule under DDP."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.compile import from_compiled
from tests.strategies.compilation.networks import (
    Adversaries,
    Block,
    FailsLater,
    Loader,
    Net,
    Normed,
    Penalised,
    Plain,
    Shortens,
    fitted,
    is_plain,
    loader,
    said,
)
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from azureml_strategy.strategies import AzureMLDDPStrategy, AzureMLDeepSpeedStrategy, AzureMLModelParallelStrategy
from azureml_strategy.strategies.compilation.parts import find_blocks
from azureml_strategy.strategies.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("fresh_compiler")

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
