"""Compiles a module's parts in place while it is fitted, and says what was not compiled, and why."""

from __future__ import annotations

import functools
import itertools
import re
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from azureml_strategy.strategies.compilation import dynamo_internals as dynamo
from azureml_strategy.strategies.compilation.parts import (
    CONTAINERS,
    beside_blocks,
    blocks_of,
    kind_of,
    networks_of,
)
from azureml_strategy.strategies.errors import ConfigurationError

Compile = Literal["blocks", "whole", "off"]

# Steps in which graphs are made. Later ones are a surprise.
_FIRST_STEPS = 2
# After so many later steps in which a function was compiled again, no more graphs are made.
_MOST_SURPRISES = 8
# A kind has graphs for training and evaluation, for inputs with and without gradients, for one size and for any.
_GRAPHS_OF_A_KIND = 8
# How many names or reasons a message lists.
_SHOWN = 3


class CompiledKind:
    """The compiled forward of all modules that share their graphs.

    torch makes the first graph for the sizes of the first call. A size that is another one later is marked as varying,
    so that the second graph serves all sizes. torch's own way to do so would confuse the sizes of kinds with one class.

    Args:
        name: under which torch reports its graphs.
        mode: of torch.compile.
        varies: whether batches are of several sizes, known before any is seen.
        settings: makes a context with torch.compile's settings, which hold in one thread.

    Attributes:
        name: as above.
        lacks_gradients: a module with parameters that train has returned tensors without gradients.
    """

    def __init__(
        self, name: str, mode: str | None, varies: bool, settings: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.name = name
        self._compiled = dynamo.compile_forward(name, mode)
        self._varies, self._settings, self._thread = varies, settings, threading.get_ident()
        # A part may be called by the rest of a forward whose graph is cut. It has its own graph there as well.
        dynamo.not_by_itself(CompiledKind.__call__)
        self._call_outside = torch.compiler.disable(self._call)  # type: ignore[no-untyped-call]
        self._locks: dict[nn.Module, threading.RLock] = {}
        self._is_settled = False
        self.lacks_gradients = False
        self._known: set[Hashable] = set()
        self._first: dict[Hashable, tuple[torch.Size, ...]] = {}
        self._varying: defaultdict[Hashable, set[tuple[int, int]]] = defaultdict(set)

    @property
    def was_called(self) -> bool:
        """Whether a module of this kind was called, other than within another graph."""
        return bool(self._known)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module of this kind."""
        if torch.compiler.is_compiling():  # it becomes part of another graph
            return dynamo.call_plain(module, *args, **kwargs)
        return self._call_outside(module, *args, **kwargs)

    def settle(self) -> None:
        """Make no more graphs. What fits none of those that there are runs uncompiled."""
        self._is_settled = True

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self._locks.setdefault(module, threading.RLock()):  # the call replaces the module's forward
            return dynamo.call_with(module, functools.partial(self._forward, module), *args, **kwargs)

    def _forward(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # Hooks of FSDP2 and ZeRO give the forward other tensors than the call was given.
        inputs: Sequence[Any] = (*args, *kwargs.values())
        if any(isinstance(each, (tuple, list, dict)) for each in inputs):
            inputs = tree_leaves(inputs)  # takes longer than all the rest here
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        sizes = tuple(each.shape for each in tensors)
        # Training and evaluation have graphs of their own, and may have batches of other sizes.
        key = (module.training, torch.is_grad_enabled(), *map(len, sizes))
        is_new = (module, key, sizes) not in self._known
        if is_new or self._varying[key]:  # a graph may be made
            self._known.add((module, key, sizes))
            self._mark_varying(key, sizes, tensors)
        if self._varies and sizes and sizes[0][:1] == (1,) and self._first[key][0][0] > 1:
            # One sample is left over for the last batch. torch would make a graph of its own for it.
            with torch.compiler.set_stance("force_eager"):
                return forward(*args, **kwargs)
        # Activation checkpointing may compute a forward again in a thread of autograd's.
        with (
            nullcontext() if threading.get_ident() == self._thread else self._settings(),
            torch.compiler.set_stance("eager_on_recompile") if self._is_settled else nullcontext(),
        ):
            outputs = self._compiled(forward, *args, **kwargs)
        if is_new and torch.is_grad_enabled():
            self.lacks_gradients |= _lack_gradients(outputs, module)
        return outputs

    def _mark_varying(self, key: Hashable, sizes: tuple[torch.Size, ...], tensors: list[Tensor]) -> None:
        varying = self._varying[key]
        for index, (size, first) in enumerate(zip(sizes, self._first.setdefault(key, sizes), strict=True)):
            varying.update((index, at) for at in range(len(size)) if size[at] != first[at])
            if self._varies and size and size[:1] == sizes[0][:1]:
                varying.add((index, 0))
        for index, dimension in varying:
            if sizes[index][dimension] > 1:  # a size of one always has a graph of its own
                dynamo.mark_varying(tensors[index], dimension)


class Compilation:
    """Compiles parts of a module from the start of a fit to its end. Names, checkpoints and copies stay as they are.

    Args:
        how: `blocks` compiles each kind of repeated block once, and larger parts beside them; `whole` compiles each
            network in one piece; `off` nothing. True is `blocks`, False and None are `off`.
        mode: of torch.compile, such as `reduce-overhead`, which replays CUDA graphs; None is its default.

    Raises:
        ConfigurationError: an unknown word.
    """

    def __init__(self, how: Compile | bool | None = "off", mode: str | None = None) -> None:
        # YAML and Hydra read a bare `off` as false.
        self.how = "blocks" if how is True else how or "off"
        if self.how not in ("blocks", "whole", "off"):
            raise ConfigurationError(f"compile={how!r} is none of blocks, whole and off.")
        self._mode = None if mode in (None, "default") else mode
        if self._mode is not None and self._mode not in dynamo.modes():
            raise ConfigurationError(f"compile_mode={mode!r} is none of {', '.join(dynamo.modes())}.")
        if self._mode is not None and self.how == "off":
            raise ConfigurationError(
                f"compile_mode={mode!r} has no effect without compile. Add compile=blocks or whole."
            )
        self._changes = ExitStack()
        self._record: dynamo.Record | None = None  # from start to stop
        self._kinds: list[CompiledKind] = []
        self._steps = 0
        self._says = False
        self._training = False
        self._surprises: Counter[str] = Counter()
        self._graphs: Counter[str] = Counter()
        self._said: set[str] = set()  # reasons of failures, kinds without gradients

    @property
    def is_on(self) -> bool:
        """Whether anything is to be compiled."""
        return self.how != "off"

    @property
    def replays_graphs(self) -> bool:
        """Whether the mode replays CUDA graphs where there is a GPU."""
        return self._mode in ("reduce-overhead", "max-autotune")

    def refuse(self, trainer: Trainer) -> None:
        """Refuse to replay graphs over gradients that wait for those of further batches: they lie in a graph's memory.

        Raises:
            ConfigurationError: gradients are accumulated.
        """
        schedules = any(isinstance(each, GradientAccumulationScheduler) for each in trainer.callbacks)  # type: ignore[attr-defined]
        if self.replays_graphs and (schedules or trainer.accumulate_grad_batches > 1):
            raise ConfigurationError(
                f"compile_mode={self._mode!r} replays CUDA graphs, which would overwrite the gradients that are "
                "accumulated. Leave compile_mode out, or set accumulate_grad_batches=1."
            )

    def parts(self, networks: Iterable[nn.Module]) -> list[nn.Module]:
        """Return what `start` compiles of networks, each part once."""
        found = (part for network in networks for part in self._parts_of(network)) if self.is_on else ()
        return list(dict.fromkeys(found))

    def start(
        self, module: LightningModule, networks: Iterable[nn.Module], says: bool, reducing_ranks: int = 1
    ) -> None:
        """Compile a module's parts at their next calls.

        Args:
            module: is fitted, and its batches are known.
            networks: what of it this rank calls: the module itself, or the layers of a stage.
            says: whether this process tells of what is not compiled.
            reducing_ranks: over which DDP reduces gradients while a backward pass computes others.
        """
        self.stop()
        self._steps, self._says, self._training = 0, says, False
        self._surprises.clear()
        self._graphs.clear()
        self._said.clear()
        parts = self.parts(networks)
        settings = functools.partial(
            dynamo.compiling,
            cut_for_buckets=self.how == "whole" and reducing_ranks > 1,
            keep_graphs=not module.automatic_optimization,
        )
        self._changes.enter_context(settings())
        self._changes.enter_context(dynamo.without_tracebacks())
        varies = _batches_vary(module.trainer.train_dataloader)
        kinds: dict[Hashable, CompiledKind] = {}
        for part in itertools.filterfalse(dynamo.has_call, parts):  # a user may have compiled it
            key = (part is module, kind_of(part))
            if key not in kinds:
                kinds[key] = CompiledKind(type(part).__name__, self._mode, varies, settings)
            call = functools.partial(kinds[key], part)
            dynamo.set_call(part, _unless_redirected(part, call) if part is module else call)
            self._changes.callback(dynamo.set_call, part, None)
        names = Counter(type(part).__name__ for part in parts)
        listed = ", ".join(f"{count} {name}" for name, count in names.items())
        of = f", of {len(kinds)} kinds" if len(kinds) > 1 else ""
        rank_zero_info(f"compile={self.how}: {listed or 'nothing'}{of}. A part that another calls is compiled with it.")
        self._kinds = [*kinds.values()]
        self._record = dynamo.Record()

    def before_batch(self, training: bool) -> None:
        """Report what the last batch has compiled, and let CUDA graphs take their memory again."""
        if self._record is None:  # Lightning validates some batches before the start
            return
        if self.replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        events, breaks = self._record.news()
        failures = [event for event in events if event.failed]
        self._say_failures(failures)
        self._say_breaks([each for each in breaks if not any(_is_told(each, event) for event in failures)])
        self._say_many([event for event in events if event.recompiled])
        self._say_without_gradients()
        if self._training and self._steps == _FIRST_STEPS and self._kinds and self._record.is_empty:
            self._say_nothing()
        if self._training and self._steps > _FIRST_STEPS:  # an evaluation has graphs of its own
            self._count_surprises({event.function: event for event in events if event.recompiled})
        self._training = training
        self._steps += training

    def stop(self) -> None:
        """Take everything off the module."""
        self._record, self._kinds = None, []
        self._changes.close()

    def explain(self, exception: BaseException) -> None:
        """Add to an error that a compiled module has caused what to do about it."""
        if self._record is not None and re.search("double backward|donated buffers", str(exception)):
            exception.add_note(
                "create_graph=True asks for derivatives of gradients, as gradient penalties do, and a compiled module "
                "cannot give them. retain_graph=True needs manual optimization there. Train with compile=off."
            )

    def _parts_of(self, network: nn.Module) -> Iterator[nn.Module]:
        if self.how == "blocks":
            blocks = blocks_of(network)
            if blocks:
                yield from (*blocks, *beside_blocks(network, set(blocks)))
                return
        # Its own forward first. What is compiled inside becomes part of it, unless a step calls that by itself.
        called = not isinstance(network, CONTAINERS)
        if called and (not isinstance(network, LightningModule) or is_overridden("forward", network)):
            yield network
        yield from networks_of(network)

    def _say_nothing(self) -> None:
        called = any(each.was_called for each in self._kinds)
        reason = dynamo.why_nothing_compiles() if called else "the steps have called none of these parts as a module"
        self._warn(f"compile={self.how} has compiled nothing in {_FIRST_STEPS} steps: {reason}.")

    def _say_failures(self, events: Iterable[dynamo.Event]) -> None:
        # torch tries what a function calls next, which fails for the same reason.
        first = {str(event.failed): event.function for event in reversed([*events])}
        for reason, function in first.items():
            if reason not in self._said:
                self._said.add(reason)
                self._warn(
                    f"{function} could not be compiled and trains uncompiled: {reason}. Mend this, or write "
                    "compile=off to save the attempt."
                )

    def _say_breaks(self, breaks: list[dynamo.Break]) -> None:
        if breaks:
            listed = "; ".join(f"{each.place} ({each.reason})" for each in breaks[:_SHOWN])
            self._warn(
                f"A compiled part is cut at {listed}. What comes before and after is compiled apart, which is slower. "
                "Take the line out of the forward pass, or leave it if it is rare."
            )

    def _say_without_gradients(self) -> None:
        for kind in self._kinds:
            if kind.lacks_gradients and kind.name not in self._said:
                self._said.add(kind.name)
                self._warn(
                    f"`{kind.name}` returns nothing that has gradients, though its parameters train. If it has them "
                    "with compile=off, the compiler has lost them: torch 2.13 does where a forward adds something "
                    "times zero to a tensor of which it also keeps the `detach()`. Take that line out of the forward "
                    "pass."
                )

    def _say_many(self, recompiled: list[dynamo.Event]) -> None:
        """Warn of kinds that need many graphs at once: blocks differ in a number, or an evaluation has a growing cache.

        No number of steps tells of these.
        """
        if not recompiled:
            return
        kinds = Counter(f"`{each.name}`" for each in self._kinds)
        for event in recompiled:
            self._graphs[event.function] += 1
            most = _GRAPHS_OF_A_KIND * kinds[event.function]
            if self._graphs[event.function] == most > 0 and not self._surprises[event.function]:
                self._warn(
                    f"{event.function} has needed more than {most} graphs so far, one as: {event.recompiled}. Each "
                    "costs as much as many steps. If the blocks differ in a number, make it a buffer; if an evaluation "
                    "has a cache that grows, allocate all of it at once, or write compile=off."
                )

    def _count_surprises(self, recompiled: dict[str, dynamo.Event]) -> None:
        for function, event in recompiled.items():
            self._surprises[function] += 1
            if self._surprises[function] == 1:
                self._warn(
                    f"{function} was compiled again in step {self._steps}: {event.recompiled}. Each "
                    "time costs as much as many steps. If sizes vary, pad them to a few, or set drop_last=True; if it "
                    "is a number that changes with each step, make it a tensor."
                )
            elif self._surprises[function] == _MOST_SURPRISES:
                self._warn(
                    f"{function} was compiled again in {_MOST_SURPRISES} steps. From now on, what "
                    "fits none of its graphs runs uncompiled."
                )
                for kind in self._kinds:
                    kind.settle()

    def _warn(self, sentence: str) -> None:
        if self._says:
            warnings.warn(sentence, stacklevel=2)


def _lack_gradients(outputs: Any, module: nn.Module) -> bool:
    """Whether a module trains, and no tensor that it has returned depends on a parameter, as far as autograd knows.

    inductor of torch 2.13 loses the gradients of `h + x * 0` where `h.detach()` is kept as well: it takes the sum for
    the detached tensor.
    """
    floats = [each for each in tree_leaves(outputs) if isinstance(each, Tensor) and each.is_floating_point()]
    trains = any(each.requires_grad for each in module.parameters())
    return trains and bool(floats) and not any(each.requires_grad for each in floats)


def _unless_redirected(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a call alone by which Lightning runs a step inside of DDP's forward: it replaces the module's for that.

    Inside of the step the module has its own forward again, as an attribute of the object.
    """

    def choose(*args: Any, **kwargs: Any) -> Any:
        forward = vars(module).get("forward", module.forward)
        is_own = getattr(forward, "__func__", None) is type(module).forward
        return call(*args, **kwargs) if is_own else dynamo.call_plain(module, *args, **kwargs)

    return choose


def _is_told(cut: dynamo.Break, failure: dynamo.Event) -> bool:
    """Whether a failure is about the same line, before and after which nothing is compiled, or the same layer."""
    return f"({cut.place})" in str(failure.failed) or (cut.is_layer and cut.reason in str(failure.failed))


def _batches_vary(loaders: Any) -> bool:
    """Whether the last batch of an epoch is smaller, as far as the loaders tell."""
    return any(
        not loader.drop_last and (sized_len(loader.sampler) or 0) % loader.batch_size != 0
        for loader in tree_leaves(loaders)
        if isinstance(loader, DataLoader) and loader.batch_size
    )
