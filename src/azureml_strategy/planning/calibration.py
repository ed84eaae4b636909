"""Fits the planner's few free numbers to runs that a user has, and says how well they fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any, Literal, get_args

import numpy as np

from azureml_strategy import __version__
from azureml_strategy.cluster.job import count
from azureml_strategy.gpus import gpu_of
from azureml_strategy.network.vm_sizes import lookup_vm_size
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.fabrics import fabric_of_size, network_kind
from azureml_strategy.planning.fitted import (
    Adjustment,
    ComputeKey,
    Correction,
    LinkKey,
    Parameters,
    SeenNetwork,
    default_parameters,
)
from azureml_strategy.planning.least_squares import Floats, Residuals, Solution, solve, solve_from
from azureml_strategy.planning.networks import Network, named_network
from azureml_strategy.planning.predict import Prediction, named_gpu, predict

Kind = Literal["inside", "across"]
Quantity = Literal["computation", "inside", "across", "latency", "slowdown", "skew"]
# How far from what is known without runs a number of a link may lie, as a standard deviation of its logarithm: so weak
# that a run which tells a number sets it, and that one which tells nothing leaves it. Published bandwidths of the same
# link differ by a factor of 10 with the library (Intel MPI through host memory against NCCL, fitted.toml). That of
# computation is the error that is expected without runs.
_SPREAD: Mapping[Quantity, float] = {"inside": 1.5, "across": 1.5, "latency": 1.0, "slowdown": 1.0, "skew": 0.7}
_NOISE = 0.01  # by which two runs of the same kind differ, relative
_BOUND = 4.6  # of a logarithm: a factor of 100
_AT_BOUND = 0.99  # share of it: the search stays within the bounds
_SLOW = -1.5  # of a bandwidth's logarithm, a second start: from a fast link alone, its traffic may be all hidden
_GOOD = 4.0  # a sum of squares for each run: an error of twice the noise
_TOLD = 0.7  # a number is told if its standard deviation is less than this part of its spread
_LEAST = 3  # runs from which each one is predicted from the others
_MOST_ERROR = 1.0
_KINDS: tuple[Kind, ...] = get_args(Kind)
# In this order numbers are freed, as there are runs that can tell them.
_FURTHER: tuple[Quantity, ...] = ("slowdown", "latency", "skew")
_BETWEEN_NODES: tuple[Quantity, ...] = ("across", *_FURTHER)  # what a plan of several nodes rests on
_WORDS: Mapping[Quantity, str] = {
    "computation": "time of a step's kernels",
    "inside": "bandwidth inside a node",
    "across": "bandwidth between nodes",
    "latency": "latency between nodes",
    "slowdown": "slowdown while communicating",
    "skew": "wait for the slowest rank",
}


@dataclass(frozen=True, eq=False)
class Observed:
    """A run whose rate was measured.

    Attributes:
        name: of the run, for a reader.
        arguments: keyword arguments of `planning.predict` for it, `network` among them.
        samples_per_second: of all GPUs.
    """

    name: str
    arguments: Mapping[str, Any]
    samples_per_second: float


@dataclass(frozen=True)
class Fit:
    """A run beside its predictions, in samples per second of all GPUs.

    Attributes:
        name: of the run.
        where: its GPUs and its network, for a reader.
        measured: the rate.
        before: predicted without the calibration.
        after: predicted with it.
        naive: predicted with it, by the naive model of `Prediction`.
        left_out: predicted by a calibration on the other runs; None if they do not tell the same numbers, or are fewer
            than two.
    """

    name: str
    where: str
    measured: float
    before: float
    after: float
    naive: float
    left_out: float | None

    def error(self, which: Literal["before", "after", "naive", "left_out"]) -> float | None:
        """The relative error of a prediction; None if there is none."""
        predicted = getattr(self, which)
        return None if predicted is None else predicted / self.measured - 1


@dataclass(frozen=True)
class FittedNumber:
    """A number that was fitted.

    Attributes:
        what: its name, for a reader.
        place: a kind of GPU, network, precision and mode, or a VM size and its network.
        before: its value without the calibration; of the computation, 1.
        after: its value.
        unit: of both.
        told: whether the runs tell it; if not, it is about where it was.
        at_bound: whether the fit ended at the largest factor that it tries, or its inverse.
    """

    what: str
    place: str
    before: float
    after: float
    unit: str
    told: bool
    at_bound: bool

    def text(self) -> str:
        """The number in words."""
        return f"{self.what} {self.before:,.3g} -> {self.after:,.3g} {self.unit}"


@dataclass(frozen=True)
class Calibration:
    """What runs say of the planner's numbers.

    Attributes:
        parameters: for `predict` and `make_plan`.
        fits: one for each run.
        numbers: what was fitted.
        version: of azureml-strategy, whose numbers these are relative to.
    """

    parameters: Parameters
    fits: tuple[Fit, ...]
    numbers: tuple[FittedNumber, ...]
    version: str

    def errors(self, which: Literal["before", "after", "naive", "left_out"]) -> list[float]:
        """Absolute relative errors of all runs that have such a prediction."""
        return [abs(error) for fit in self.fits if (error := fit.error(which)) is not None]

    def lines(self) -> list[str]:
        """Sentences for a reader: which runs, how well they fit, what was fitted, and what they do not tell."""
        held_out = self.errors("left_out")
        each = f"Each from the others: {_spread(held_out)}, of {count(len(held_out), 'run')}."
        told, untold = _by_place(self.numbers, True), _by_place(self.numbers, False)
        ended = ", ".join(f"{each.what} ({each.place})" for each in self.numbers if each.at_bound)
        return [
            *([] if self.version == __version__ else [_of_another_version(self.version)]),
            f"With a {self.parameters.name}: {_spread(self.errors('after'))}; without it: "
            f"{_spread(self.errors('before'))}; the naive model: {_spread(self.errors('naive'))}.",
            each if held_out else "No run could be predicted from the others, so these errors are of the fit alone.",
            *([f"Fitted: {told}."] if told else []),
            *([f"Ended at the bound of a factor of 100, so its cause is another: {ended}."] if ended else []),
            *([f"Not told by these runs, and so left about as it was: {untold}."] if untold else []),
        ]


def _of_another_version(version: str) -> str:
    return (
        f"This calibration was made by azureml-strategy {version}, and this is {__version__}: its factors are relative "
        "to that version's numbers. Make it anew with --calibrate RUN."
    )


def _by_place(numbers: Sequence[FittedNumber], told: bool) -> str:
    """The numbers that are told, with their values, or the names of those that are not."""
    chosen = [each for each in numbers if each.told == told]
    texts = [
        f"{place}: {', '.join(each.text() if told else each.what for each in chosen if each.place == place)}"
        for place in dict.fromkeys(each.place for each in chosen)
    ]
    return "; ".join(texts)


def _spread(errors: Sequence[float]) -> str:
    return f"median error {median(errors):.1%}, worst {max(errors):.1%}" if errors else "no error known"


def calibrate(observed: Sequence[Observed], parameters: Parameters | None = None) -> Calibration:
    """Fit one number of computation for each kind of GPU, network, precision and mode, and the links of VM sizes.

    The numbers minimise the squared relative errors of the rates. A weak pull towards what is known without the runs
    keeps those that the runs do not tell where they were. Of a link, a run inside a node frees the bandwidth inside, a
    run of several nodes that between them; further runs of other settings free slowdown, latency and skew, in turn.

    Args:
        observed: at least one run.
        parameters: what is known without the runs; by default fitted.toml.

    Raises:
        PlanError: there is no run, a rate is not positive, or a run cannot be predicted.
    """
    known = parameters or default_parameters()
    cases = [_case(each, known) for each in observed]
    if not cases:
        raise PlanError("There is no run to calibrate on. Name at least one that measured its throughput on GPUs.")
    before = [each.predict(known) for each in cases]
    unknowns = _unknowns(cases)
    found = _fit(cases, unknowns, known)
    fitted = _with(known, unknowns, found.unknowns)
    after = [each.predict(fitted) for each in cases]
    left_out = [_left_out(place, cases, known, unknowns, found) for place in range(len(cases))]
    fits = tuple(
        Fit(case.name, case.where, case.rate, old.samples_per_second, new.samples_per_second, new.naive, held)
        for case, old, new, held in zip(cases, before, after, left_out, strict=True)
    )
    named = replace(fitted, name=_name(cases))
    numbers = tuple(_numbers(unknowns, found, known, fitted))
    return Calibration(_with_errors(named, known, cases, after, fits), fits, numbers, __version__)


def _name(cases: Sequence[_Case]) -> str:
    names = ", ".join(each.name for each in cases[:4])
    rest = f" and {len(cases) - 4} more" if len(cases) > 4 else ""
    places = sorted({each.compute[0] for each in cases})
    return f"calibration on {count(len(cases), 'run')} of {', '.join(places)} ({names}{rest})"


@dataclass(frozen=True, eq=False)
class _Case:
    """A run with what it can tell.

    `kind` is where it says something of its links; None nowhere. `spread` is the error of computation without runs.
    """

    name: str
    arguments: Mapping[str, Any]
    rate: float
    compute: ComputeKey
    link: LinkKey | None
    kind: Kind | None
    spread: float
    where: str

    def predict(self, known: Parameters) -> Prediction:
        return predict(**self.arguments, parameters=known)

    @property
    def setting(self) -> tuple[Any, ...]:
        """Two runs of the same setting tell no more numbers than one."""
        network: Network = self.arguments["network"]
        others = tuple((name, str(value)) for name, value in self.arguments.items() if name != "network")
        return network.name, network.parameters, network.flops, others


def _case(observed: Observed, known: Parameters) -> _Case:
    given = dict(observed.arguments)
    if not 0 < observed.samples_per_second < math.inf:
        raise PlanError(f"{observed.name} measured {observed.samples_per_second} samples/s. Leave it out.")
    first = predict(**given)  # says what is wrong with the arguments
    if isinstance(given["network"], str):
        given["network"] = named_network(given["network"])
    size = lookup_vm_size(given["vm_size"]) if given.get("vm_size") else None
    gpu = named_gpu(given["gpu"]) if given.get("gpu") else gpu_of(size) if size else None
    if gpu is None:
        raise PlanError(f"{observed.name} names neither a GPU nor a VM size with one. Leave it out.")
    compute = gpu.model, given["network"].family, given.get("precision", "bf16-mixed"), given.get("compiled", False)
    nodes = given.get("nodes", 1)
    kind: Kind | None = None if first.gpus == 1 else "across" if nodes > 1 else "inside"
    link = None
    if size is None or given.get("across_gb" if kind == "across" else "inside_gb") is not None:
        kind = None  # the bandwidth was given
    if size is not None and kind is not None:
        link = size.short_name, network_kind(size, given.get("interconnect"))
    where = f"{first.gpus} {gpu.model}" + (f" on {nodes} nodes over {link[1]}" if link and nodes > 1 else "")
    rate = observed.samples_per_second
    one = predict(**given | {"nodes": 1, "gpus_per_node": 1, "strategy": "ddp"}, parameters=known)
    spread = one.high / one.samples_per_second - 1
    return _Case(observed.name, given, rate, compute, link, kind, spread, f"{where}, {given['network'].name}")


@dataclass(frozen=True)
class _Unknown:
    """A number that is fitted, as the logarithm of a factor."""

    quantity: Quantity
    compute: ComputeKey | None = None
    link: LinkKey | None = None
    spread: float = field(default=1.0, compare=False)

    @property
    def place(self) -> str:
        if self.link is not None:
            return " over ".join(self.link)
        model, family, precision, compiled = self.compute or ("", "", "", False)
        return f"{model}, {family}, {precision}, {'compiled' if compiled else 'eager'}"


def _unknowns(cases: Sequence[_Case]) -> list[_Unknown]:
    """What is free: as many numbers of a link as runs with other settings, apart from those that computation takes."""
    spreads = {each.compute: each.spread for each in cases}
    found = [_Unknown("computation", compute=key, spread=spread) for key, spread in spreads.items()]
    alone = {each.compute for each in cases if each.kind is None}
    for link in dict.fromkeys(each.link for each in cases if each.link is not None):
        own = [each for each in cases if each.link == link]
        kinds: list[Kind] = [kind for kind in _KINDS if any(each.kind == kind for each in own)]
        found += [_Unknown(kind, link=link, spread=_SPREAD[kind]) for kind in kinds]
        settings = {each.setting for each in own if each.kind == "across"}
        taken = 1 + (len({each.compute for each in own} - alone) if kinds == ["across"] else 0)
        further = max(len(settings) - taken, 0)
        found += [_Unknown(each, link=link, spread=_SPREAD[each]) for each in _FURTHER[:further]]
    return found


def _with(known: Parameters, unknowns: Sequence[_Unknown], logarithms: Floats) -> Parameters:
    """The parameters with these numbers in them."""
    corrections, adjustments = dict(known.corrections), dict(known.adjustments)
    for unknown, factor in zip(unknowns, np.exp(logarithms).tolist(), strict=True):
        if unknown.compute is not None:
            old = corrections.get(unknown.compute, Correction(1.0, known.errors["same_gpu"], ""))
            corrections[unknown.compute] = replace(old, factor=factor * old.factor)
        if unknown.link is not None:
            link = adjustments.get(unknown.link, Adjustment())
            changed: dict[str, Any] = {unknown.quantity: factor * getattr(link, unknown.quantity)}
            adjustments[unknown.link] = replace(link, **changed)
    return replace(known, corrections=corrections, adjustments=adjustments)


def _residuals(cases: Sequence[_Case], unknowns: Sequence[_Unknown], known: Parameters) -> Residuals:
    """The relative errors of the runs, then how far each unknown is from where it was, in units of what is usual."""
    spreads = np.array([each.spread for each in unknowns])

    @cache  # of the numbers that concern a run, most are the same from one derivative to the next
    def rate(case: _Case, correction: Correction | None, adjustment: Adjustment | None) -> float:
        return case.predict(_only(known, case, correction, adjustment)).samples_per_second

    def residuals(given: Floats) -> Floats:
        tried = _with(known, unknowns, given)
        errors = [math.log(rate(each, *_of(each, tried)) / each.rate) / _NOISE for each in cases]
        return np.array([*errors, *(given / spreads)])

    return residuals


def _fit(cases: Sequence[_Case], unknowns: Sequence[_Unknown], known: Parameters) -> Solution:
    same = np.zeros(len(unknowns))
    slow = np.array([_SLOW if each.quantity in _KINDS else 0.0 for each in unknowns])
    return solve(_residuals(cases, unknowns, known), [same, slow], _BOUND, _GOOD * len(cases))


def _of(case: _Case, parameters: Parameters) -> tuple[Correction | None, Adjustment | None]:
    """What of the parameters concerns a run."""
    adjustment = None if case.link is None else parameters.adjustments.get(case.link)
    return parameters.corrections.get(case.compute), adjustment


def _only(known: Parameters, case: _Case, correction: Correction | None, adjustment: Adjustment | None) -> Parameters:
    corrections = {} if correction is None else {case.compute: correction}
    adjustments = {} if adjustment is None or case.link is None else {case.link: adjustment}
    return replace(known, corrections=corrections, adjustments=adjustments)


def _left_out(
    place: int, cases: Sequence[_Case], known: Parameters, unknowns: Sequence[_Unknown], found: Solution
) -> float | None:
    """The rate of a run by a calibration on the others; None where they are too few or tell other numbers."""
    case, others = cases[place], [*cases[:place], *cases[place + 1 :]]
    same_compute = any(each.compute == case.compute for each in others)
    same_link = case.link is None or any((each.link, each.kind) == (case.link, case.kind) for each in others)
    if len(cases) < _LEAST or not (same_compute and same_link):
        return None
    own = _unknowns(others)
    columns = [unknowns.index(each) for each in own]
    rows = [*(row for row in range(len(cases)) if row != place), *(len(cases) + column for column in columns)]
    residuals = _residuals(others, own, known)
    near = solve_from(residuals, found.unknowns[columns], _BOUND, found.slope[np.ix_(rows, columns)])
    return case.predict(_with(known, own, near.unknowns)).samples_per_second


def _with_errors(
    fitted: Parameters, known: Parameters, cases: Sequence[_Case], after: Sequence[Prediction], fits: Sequence[Fit]
) -> Parameters:
    """The parameters with the errors to expect, from runs that were predicted from the others, and with their source.

    The error that is assumed without runs counts as that of one more run.
    """
    rows = list(zip(cases, after, fits, strict=True))
    corrections, adjustments = dict(fitted.corrections), dict(fitted.adjustments)
    for key in {each.compute for each in cases}:
        of_key = [(case, fit, 1.0) for case, _, fit in rows if case.compute == key]
        error = _expected([each for each in of_key if each[0].kind != "across"] or of_key, known.errors["same_gpu"])
        range_ = _range([case for case, *_ in of_key])
        corrections[key] = replace(corrections[key], error=error, source=fitted.name, **range_)
    for link in {each.link for each in cases if each.link is not None}:
        of_link = [(case, fit, each.communication_s / each.step_s) for case, each, fit in rows if case.link == link]
        errors = {
            kind: _expected(own, known.errors[link[1] if kind == "across" else "infiniband"])
            for kind in _KINDS
            if (own := [each for each in of_link if each[0].kind == kind])
        }
        adjustments[link] = replace(
            adjustments[link],
            error=errors.get("across"),
            inside_error=errors.get("inside"),
            source=fitted.name,
        )
    return replace(fitted, corrections=corrections, adjustments=adjustments)


def _range(cases: Sequence[_Case]) -> dict[str, Any]:
    """The networks and the batches of runs, as `Correction` has them."""
    networks = [each.arguments["network"] for each in cases]
    seen = dict.fromkeys(SeenNetwork(each.name, each.parameters, each.flops) for each in networks)
    batches = [float(each.arguments["batch_size"]) for each in cases]
    return {"networks": tuple(seen), "smallest_batch": min(batches), "largest_batch": max(batches)}


def _expected(rows: Sequence[tuple[_Case, Fit, float]], assumed: float) -> float:
    """The relative error to expect of a part of a step, from the errors of whole steps and that part's share of each.

    Runs of the same setting count as one: that they repeat one another says nothing of other settings. Without a run
    that was predicted from others, it is the assumed one, or that of the fit if it is larger.
    """
    settings: dict[tuple[Any, ...], tuple[list[Fit], float]] = {}
    for case, fit, share in rows:
        settings.setdefault(case.setting, ([], share))[0].append(fit)
    held_out = [
        (square, share)
        for fits, share in settings.values()
        if (square := _mean_square([each.error("left_out") for each in fits])) is not None
    ]
    whole = sum(share**2 for _, share in settings.values()) or 1.0
    if not held_out:
        squares = sum(_mean_square([each.error("after") for each in fits]) or 0.0 for fits, _ in settings.values())
        return min(max(assumed, math.sqrt(squares / whole)), _MOST_ERROR)
    one = whole / len(settings)
    squares = assumed**2 * one + sum(square for square, _ in held_out)
    return min(math.sqrt(squares / (one + sum(share**2 for _, share in held_out))), _MOST_ERROR)


def _mean_square(errors: Sequence[float | None]) -> float | None:
    known = [each**2 for each in errors if each is not None]
    return sum(known) / len(known) if known else None


def _numbers(
    unknowns: Sequence[_Unknown], found: Solution, known: Parameters, fitted: Parameters
) -> Iterator[FittedNumber]:
    for unknown, logarithm, deviation in zip(unknowns, found.unknowns.tolist(), found.deviations.tolist(), strict=True):
        told = deviation < _TOLD * unknown.spread
        yield _number(unknown, known, fitted, told, abs(logarithm) > _AT_BOUND * _BOUND)
    for link in dict.fromkeys(each.link for each in unknowns if each.link is not None):
        free = {each.quantity for each in unknowns if each.link == link}
        fixed = [each for each in _BETWEEN_NODES if each not in free]
        yield from (_number(_Unknown(each, link=link), known, fitted, False, False) for each in fixed)


def _number(unknown: _Unknown, known: Parameters, fitted: Parameters, told: bool, at_bound: bool) -> FittedNumber:
    what, place = _WORDS[unknown.quantity], unknown.place
    if unknown.link is None:
        key = unknown.compute or ("", "convolutional", "", False)
        before, after = (each.corrections[key].factor if key in each.corrections else 1.0 for each in (known, fitted))
        return FittedNumber(what, place, before, after, "times", told, at_bound)
    size, kind = lookup_vm_size(unknown.link[0]), unknown.link[1]
    values, unit = [], ""
    for parameters in (known, fitted):
        joined = fabric_of_size(size, 2, 1, parameters, kind)  # type: ignore[arg-type]
        inside, across = joined.fabric.inside, joined.fabric.across
        value, unit = {
            "inside": (inside.bandwidth / 1e9, "GB/s"),
            "across": (across.bandwidth / 1e9, "GB/s"),
            "latency": (1e6 * across.latency_s, "us"),
            "slowdown": (100 * across.slowdown, "%"),
            "skew": (100 * joined.skew, "%"),
        }[unknown.quantity]
        values.append(value)
    return FittedNumber(what, place, values[0], values[1], unit, told, at_bound)
