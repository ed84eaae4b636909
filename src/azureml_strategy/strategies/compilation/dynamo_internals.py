"""Private names of torch.compile: what it has compiled, what it could not, and in which frame of the user's.

They are imported where they are used, as a run that compiles nothing should not wait for torch's compiler.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# torch gives up after so many graphs of one function. Blocks may differ in numbers that are part of a graph.
_GRAPHS_OF_A_KIND = 64
# Characters of a reason that is shown.
_LONGEST = 200
_TORCH = str(Path(torch.__file__).parent)
# How torch describes the call of a function of `torch.compiler.disable`.
_DISABLED = "Skip calling `torch.compiler.disable()`d function"


class Event(NamedTuple):
    """One compilation.

    Attributes:
        function: the name of the kind; or of the rest of a forward after a cut, with `FILE:LINE`.
        recompiled: why the graphs before did not serve; None for a first one.
        failed: why there is no graph; None if there is one.
    """

    function: str
    recompiled: str | None
    failed: str | None


class Break(NamedTuple):
    """Where a graph was cut.

    Attributes:
        place: `FILE:LINE`, or the name of a layer of torch's that no function of the user's calls in a graph.
        reason: torch's.
        is_layer: whether the place is a layer.
    """

    place: str
    reason: str
    is_layer: bool


class Record:
    """What was compiled since the last look."""

    def __init__(self) -> None:
        self._begun = _attempts()
        self._last: Any = None
        self._attempts = -1
        self._breaks: dict[str, Break] = {}
        self.news()

    @property
    def is_empty(self) -> bool:
        """Whether torch has not tried to compile anything since this record began."""
        return self._attempts == self._begun

    def news(self) -> tuple[list[Event], list[Break]]:
        """Return compilations, at most the last 64, which torch keeps, and where graphs were cut, each place once.

        It costs nothing in a step without any.
        """
        from torch._dynamo import utils

        attempts = _attempts()
        if attempts == self._attempts:
            return [], []
        self._attempts = attempts
        kept = utils.get_compilation_metrics()
        new = kept[next((at + 1 for at, each in enumerate(kept) if each is self._last), 0) :]
        self._last = kept[-1] if kept else None
        found = {each.place: each for each in map(_break, utils.graph_break_reasons) if each is not None}
        breaks = [each for place, each in found.items() if place not in self._breaks]
        self._breaks.update(found)
        return [_event(each) for each in new if each.co_name is not None], breaks


def compile_forward(name: str, mode: str | None) -> Callable[..., Any]:
    """Return a compiled `call(forward, ...)`, whose graphs serve the forwards of all modules of a kind, and no others.

    Args:
        name: of the kind, under which torch reports what it compiles.
        mode: of torch.compile.
    """
    # Sizes that vary are marked. By itself, torch would take the sizes of two kinds for one size that varies.
    settings: dict[str, Any] = {"mode": mode, "dynamic": False}
    if _can_isolate():
        settings |= {"isolate_recompiles": True, "recompile_limit": _GRAPHS_OF_A_KIND}
    call = types.FunctionType(_call.__code__.replace(co_name=name), globals(), name)
    return torch.compile(call, **settings)


def _call(forward, *args, **kwargs):  # type: ignore[no-untyped-def]
    return forward(*args, **kwargs)


def not_by_itself(function: Callable[..., Any]) -> None:
    """Have torch make no graph of a function's own. It can still become part of the graph of what calls it.

    torch would make one if the function is called by the rest of a forward whose graph is cut.
    """
    from torch._dynamo.decorators import skip_code  # type: ignore[attr-defined]  # all versions have it there

    skip_code(function.__code__)


def set_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `module(...)` call this in place of hooks and forward. Copies and pickles of the module do not."""
    module._compiled_call_impl = None if call is None else _Call(call)


class _Call:
    """A call that becomes None in a copy and in a pickle, where it would still run the module that was copied.

    nn.Module leaves it out of both. A class with a `__getstate__` of its own does not, such as LightningModule.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        not_by_itself(_Call.__call__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def has_call(module: nn.Module) -> bool:
    """Whether the module was compiled, by a user as well, in place or by torch.compile around it."""
    from torch import _dynamo

    return module._compiled_call_impl is not None or isinstance(module, _dynamo.OptimizedModule)


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


def mark_varying(tensor: Tensor, dimension: int) -> None:
    """Let the next graph be made for any size of a dimension, unless the function needs one size."""
    from torch import _dynamo

    _dynamo.maybe_mark_dynamic(tensor, dimension)


@contextmanager
def compiling(cut_for_buckets: bool, keep_graphs: bool) -> Iterator[None]:
    """Let functions that cannot be compiled in this thread run as they are, from their first pass on.

    Args:
        cut_for_buckets: cut graphs where DDP's buckets end, for gradients to be sent while others are computed.
        keep_graphs: let several backward passes go through one graph, with retain_graph=True.
    """
    from torch._dynamo import config
    from torch._functorch import config as autograd_config

    # Modules of a kind may have different hooks, and a callback may add some in a fit. torch looks at none by default.
    settings: dict[str, Any] = {"suppress_errors": True, "skip_nnmodule_hook_guards": False}
    if not cut_for_buckets:
        settings["optimize_ddp"] = False
    if not _can_isolate():
        settings["recompile_limit"] = _GRAPHS_OF_A_KIND
    # A backward pass is compiled with its forward pass: later, nothing could take its place.
    at_once = autograd_config.patch(force_non_lazy_backward_lowering=True, donated_buffer=not keep_graphs)
    with at_once, config.patch(settings):
        yield


@contextmanager
def without_tracebacks() -> Iterator[None]:
    """Leave out what torch logs of a function that it cannot compile."""
    failures = logging.getLogger("torch._dynamo.convert_frame")
    failures.addFilter(_has_no_traceback)
    try:
        yield
    finally:
        failures.removeFilter(_has_no_traceback)


def modes() -> list[str]:
    """Return the values of torch.compile's `mode`."""
    import torch._inductor

    return list(torch._inductor.list_mode_options())


def why_nothing_compiles() -> str:
    """Return what has torch.compile run everything as it is, which it does in silence."""
    from torch._dynamo import config, eval_frame

    modes = [type(each).__name__ for each in _get_current_dispatch_mode_stack()]
    if config.disable or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCH_COMPILE_DISABLE=1 or TORCHDYNAMO_DISABLE=1 is set"
    if eval_frame._stance.stance != "default":
        return f'torch.compiler.set_stance("{eval_frame._stance.stance}") is in force'
    if modes:
        return f"{modes[-1]} is on, and torch compiles nothing within such a mode"
    return "torch compiles nothing within a TorchDispatchMode such as FlopCounterMode, or after one that was not left"


def _attempts() -> int:
    from torch._dynamo import utils

    return int(utils.counters["frames"]["total"])


def _can_isolate() -> bool:
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters  # torch 2.13 and newer


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return not record.exc_info


def _event(metrics: Any) -> Event:
    failed = f"{metrics.fail_type}: {_first_words(metrics.fail_reason)}" if metrics.fail_type else None
    if _DISABLED in str(metrics.fail_reason):
        failed = None
    if failed and metrics.fail_user_frame_lineno and not str(metrics.fail_user_frame_filename).startswith(_TORCH):
        failed = f"{failed} ({metrics.fail_user_frame_filename}:{metrics.fail_user_frame_lineno})"
    recompiled = _first_words(metrics.recompile_reason or "")
    place = "" if metrics.co_filename == __file__ else f" ({metrics.co_filename}:{metrics.co_firstlineno})"
    return Event(f"`{metrics.co_name}`{place}", recompiled or None, failed)


def _first_words(reason: str) -> str:
    """Return a reason of torch's in one line, without the hints and traces that follow it."""
    words = re.sub(r" \(HINT.*| \(user code.*|(User stack trace|Explanation:).*|\n\n.*", "", reason, flags=re.DOTALL)
    return textwrap.shorten(words.replace("\n", " "), _LONGEST, placeholder=" ...")


def _break(cut: Any) -> Break | None:
    """Return a cut with the user's innermost line; None without one, or if a function is kept out of graphs on purpose.

    Functions that communicate are.
    """
    if cut.reason.startswith(_DISABLED):
        return None
    lines = [each for each in cut.user_stack if not each.filename.startswith(_TORCH)]
    if not lines:
        return None
    is_layer = lines[-1].filename == __file__
    place = f"`{lines[-1].name}`" if is_layer else f"{lines[-1].filename}:{lines[-1].lineno}"
    return Break(place, _first_words(cut.reason), is_layer)
