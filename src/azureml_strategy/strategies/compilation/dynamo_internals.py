"""Private names of torch.compile: what it has compiled, what it could not, and in which frame of the user's.

They are imported where they are used, as a run that compiles nothing should not wait for torch's compiler.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# torch gives up after so many graphs of one function. Blocks may differ in numbers that are part of a graph.
_GRAPHS_OF_A_KIND = 64
# The rest of a function after a graph break is compiled under this name, followed by the function's and the line.
_REST = "torch_dynamo_resume_in_"
# How torch describes the call of a function of `torch.compiler.disable`.
_DISABLED = "Skip calling `torch.compiler.disable()`d function"


class Event(NamedTuple):
    """One compilation.

    Attributes:
        function: name of the function.
        place: `FILE:LINE`, where the function begins, or where a graph broke if it is the rest of one.
        is_rest: whether it is the rest of a function after a graph break.
        recompiled: why the graphs before did not serve; None for a first one.
        failed: why there is no graph; None if there is one.
    """

    function: str
    place: str
    is_rest: bool
    recompiled: str | None
    failed: str | None


class Record:
    """What was compiled since the last look."""

    def __init__(self) -> None:
        self._last: Any = None
        self._attempts = -1
        self._breaks: dict[str, int] = {}
        self.news()

    def news(self) -> tuple[list[Event], list[str]]:
        """Return compilations, at most the last 64, which torch keeps, and why graphs broke. It costs nothing in a step
        without any.
        """
        from torch._dynamo import utils

        attempts = utils.counters["frames"]["total"]
        if attempts == self._attempts:
            return [], []
        self._attempts = attempts
        kept = utils.get_compilation_metrics()
        new = kept[next((at + 1 for at, each in enumerate(kept) if each is self._last), 0) :]
        self._last = kept[-1] if kept else None
        breaks = dict(utils.counters["graph_break"])
        reasons = [each for each, times in breaks.items() if times > self._breaks.get(each, 0)]
        self._breaks = breaks
        return [_event(each) for each in new if each.co_name is not None], reasons


def compile_forward(mode: str | None) -> Callable[..., Any]:
    """Return a compiled `call(forward, ...)`, whose graphs serve the forwards of all modules of a kind, and no others.

    Args:
        mode: of torch.compile.
    """
    # Sizes that vary are marked. By itself, torch would take the sizes of two kinds for one size that varies.
    settings: dict[str, Any] = {"mode": mode, "dynamic": False}
    if _can_isolate():
        settings |= {"isolate_recompiles": True, "recompile_limit": _GRAPHS_OF_A_KIND}
    return torch.compile(_call, **settings)


def _call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `module(...)` call this in place of hooks and forward. Copies and pickles of the module do not."""
    module._compiled_call_impl = call


def has_call(module: nn.Module) -> bool:
    """Whether the module was compiled in place, by a user as well."""
    return module._compiled_call_impl is not None


def call_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as if it were not compiled."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_with(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module with `forward(its own forward, ...)` in place of its own. Its hooks stay outside, uncompiled.

    torch.compile of the call would compile each hook apart, as far as it can.
    """
    attributes, replaced = vars(module), vars(module).get("forward")
    attributes["forward"] = functools.partial(forward, module.forward)
    try:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        if replaced is None:
            del attributes["forward"]
        else:
            attributes["forward"] = replaced


def is_meant(reason: str) -> bool:
    """Whether a graph broke at a function that its author keeps out of graphs, as those that communicate."""
    return _DISABLED in reason


def mark_varying(tensor: Tensor, dimension: int) -> None:
    """Let the next graph be made for any size of a dimension, unless the function needs one size."""
    from torch import _dynamo

    _dynamo.maybe_mark_dynamic(tensor, dimension)


@contextmanager
def compiling(cut_for_buckets: bool) -> Iterator[None]:
    """Let functions that cannot be compiled run as they are, from their first pass on.

    Args:
        cut_for_buckets: cut graphs where DDP's buckets end, for gradients to be sent while others are computed.
    """
    from torch._dynamo import config
    from torch._functorch import config as autograd_config

    settings: dict[str, Any] = {"suppress_errors": True}
    if not cut_for_buckets:
        settings["optimize_ddp"] = False
    if not _can_isolate():
        settings["recompile_limit"] = _GRAPHS_OF_A_KIND
    failures = logging.getLogger("torch._dynamo.convert_frame")
    failures.addFilter(_has_no_traceback)
    try:
        # A backward pass is compiled with its forward pass: later, nothing could take its place.
        with autograd_config.patch(force_non_lazy_backward_lowering=True), config.patch(settings):
            yield
    finally:
        failures.removeFilter(_has_no_traceback)


def modes() -> list[str]:
    """Return the values of torch.compile's `mode`."""
    import torch._inductor

    return list(torch._inductor.list_mode_options())


def _can_isolate() -> bool:
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters  # torch 2.13 and newer


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info


def _event(metrics: Any) -> Event:
    is_rest = metrics.co_name.startswith(_REST)
    function = metrics.co_name.removeprefix(_REST).rpartition("_at_")[0] if is_rest else metrics.co_name
    failed = f"{metrics.fail_type}: {metrics.fail_reason}" if metrics.fail_type else None
    place = f"{metrics.co_filename}:{metrics.co_firstlineno}"
    return Event(function, place, is_rest, metrics.recompile_reason, failed)
