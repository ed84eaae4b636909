"""What is not compiled, or compiled too often, is said once."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.compilation.networks import (
    Block,
    Branching,
    Counting,
    Experts,
    Net,
    Plain,
    Reads,
    ReadsInStep,
    Wide,
    fitted,
    loader,
    said,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from azureml_strategy.strategies import AzureMLDeepSpeedStrategy

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NETWORKS = Path(__file__).with_name("networks.py")


def test_a_backend_that_fails_is_named_once_and_it_trains_uncompiled() -> None:
    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such luck")

    eager, _ = fitted(Net, "off", loader())
    torch.compiler.set_default_backend(fails)
    with pytest.warns(UserWarning, match=r"`Block` could not be compiled.*no such luck") as record:
        compiled, _ = fitted(Net, "blocks", loader())
    assert len(said(record)) == 1
    assert compiled.losses == eager.losses


def test_zero_3_says_that_it_compiles_nothing_of_a_module_without_blocks() -> None:
    strategy = AzureMLDeepSpeedStrategy(stage=3, compile="blocks")
    strategy._lightning_module = Plain(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    with pytest.warns(UserWarning, match=r"compiles nothing: Plain repeats no part.*sharded_blocks.*stage=2"):
        assert [*strategy.trained_networks()] == []
    strategy._lightning_module = Net()
    assert [*strategy.trained_networks()] == [strategy._lightning_module]


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
    line = next(n for n, each in enumerate(NETWORKS.read_text().splitlines(), 1) if "# this line cuts" in each)
    with pytest.warns(UserWarning, match=rf"cut at .*networks\.py:{line} \(") as record:
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
    assert f"({NETWORKS}:" in of_line
    (of_line,) = messages(lambda: Reads(nn.LSTM(8, 8)))
    assert f"({NETWORKS}:" in of_line


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


def test_without_a_compiler_it_says_so_once_and_trains(tmp_path: Path) -> None:
    """In a process of its own, as torch looks for a compiler once."""
    environ = os.environ | {"CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [
        sys.executable,
        "-c",
        "from tests.strategies.compilation.test_compile_warnings import without_a_compiler; without_a_compiler()",
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
