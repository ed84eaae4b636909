"""Shows a plan: a table with remarks, and a picture of time against cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from io import BytesIO

from rich.table import Table

from azureml_strategy.cluster.job import count, format_money
from azureml_strategy.planning.candidates import Candidate, Plan, frontier
from azureml_strategy.planning.commands import submit_command
from azureml_strategy.tracking.tables import print_table

_ROWS = 12  # of the table; the JSON has all
_TEXTS = ("size", "strategy", "bound by")
_WIDTH = 200


def print_plan(plan: Plan, rows: int = _ROWS, written: str = "") -> None:
    """Print the table, what follows from it, and the command that submits the best candidate.

    Args:
        plan: with at least one candidate.
        rows: sizes and numbers of nodes that are shown.
        written: paths of written files, for the last line.
    """
    shown = _shown(plan, rows)
    columns = [(heading, value) for heading, value in _columns(plan).items() if any(map(value, shown))]
    table = Table()
    for heading, _ in columns:
        table.add_column(heading, justify="left" if heading in _TEXTS else "right")
    for each in shown:
        table.add_row(*(value(each) or "-" for _, value in columns))
    last = [f"Written: {written}"] if written else []
    print_table(table, [*_remarks(plan, shown), *last], width=_WIDTH)


def _shown(plan: Plan, rows: int) -> list[Candidate]:
    """The best of each size and number of nodes, and always one of a single node and one of several."""
    places = plan.of_places()
    shown = places[:rows]
    for scaled_out in (False, True):
        best = next((each for each in places if each.is_scaled_out is scaled_out), None)
        if best is not None and best not in shown:
            shown.append(best)
    return shown


def _columns(plan: Plan) -> dict[str, Callable[[Candidate], str]]:
    workload = plan.workload
    currency = _currency(plan)
    return {
        "size": lambda each: each.size.name.removeprefix("Standard_"),
        "nodes": lambda each: str(each.nodes),
        "GPUs": lambda each: f"{each.prediction.gpus} {each.size.gpu_model}",
        "strategy": lambda each: each.strategy,
        f"{workload.unit}/s": lambda each: f"{each.prediction.samples_per_second * workload.per_sample:,.0f}",
        "+-": lambda each: f"{each.prediction.high / each.prediction.samples_per_second - 1:.0%}",
        "efficiency": lambda each: f"{each.prediction.efficiency:.0%}",
        "step, ms": lambda each: _milliseconds(each.prediction.step_s),
        "compute": lambda each: _milliseconds(each.prediction.compute_s),
        "network": lambda each: _milliseconds(each.prediction.communication_s),
        "bubble": lambda each: _milliseconds(each.prediction.bubble_s),
        "data": lambda each: _milliseconds(each.prediction.data_s),
        "GB a GPU": _gigabytes,
        "hours": lambda each: "" if each.hours is None else f"{each.hours:,.3g}",
        f"{currency}": lambda each: "" if each.cost is None else format_money(each.cost),
        f"{currency} per 10^6": lambda each: (
            "" if each.cost_per_million is None else format_money(each.cost_per_million)
        ),
        "bound by": lambda each: each.prediction.bound_by,
    }


def _gigabytes(each: Candidate) -> str:
    if each.memory_bytes is None:
        return ""
    return f"{each.memory_bytes / 1e9:,.1f}{' NO' if each.fits is False else ''}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds > 0 else ""


def _currency(plan: Plan) -> str:
    return next((each.price.currency for each in plan.candidates if each.price), "cost")


def _remarks(plan: Plan, shown: Sequence[Candidate]) -> Iterator[str]:
    best = shown[0]
    yield f"Speed is derived from {best.prediction.basis}; +- is the error to expect."
    yield from _up_or_out(shown)
    large = [each for each in shown if each.fits is False and each.memory is not None]
    if large:
        held = large[0].memory.text() if large[0].memory else ""
        yield f"NO: more than the GPU has. {large[0].size.name}, {large[0].strategy}: {held}."
    slow = [each for each in shown if each.nodes > 1 and not each.size.infiniband]
    if slow:
        names = ", ".join(sorted({each.size.name for each in slow}))
        yield f"Without InfiniBand, several nodes exchange gradients over Ethernet: {names}."
    if all(each.price is None for each in plan.candidates):
        yield "No cost: no price is known. Give --price SIZE=X, or --region for Azure's price list."
    if best.hours is not None and plan.ends_by_steps:
        yield (
            f"Hours are those of the recipe's {plan.workload.steps:,} steps, in which more GPUs train on more samples. "
            "Give --samples N to compare equal trainings."
        )
    if best.hours is None:
        yield "No hours: the recipe does not say on how many samples it trains. Give --samples N."
    yield from plan.notes
    for sentence in plan.left_out[:5]:
        yield f"Left out: {sentence}"
    yield f"To run the first: {submit_command(plan.workload, best)}"


def _up_or_out(shown: Sequence[Candidate]) -> Iterator[str]:
    """Compare the best single node with the best of several nodes."""
    up = next((each for each in shown if not each.is_scaled_out), None)
    out = next((each for each in shown if each.is_scaled_out), None)
    if up is None or out is None:
        return
    faster = out.prediction.samples_per_second / up.prediction.samples_per_second
    text = (
        f"Scaling up: one {up.size.name}. Scaling out: {count(out.nodes, 'node')} of {out.size.name}, "
        f"{faster:.2g} times as fast"
    )
    if up.cost_per_million and out.cost_per_million:
        text += f" at {out.cost_per_million / up.cost_per_million:.2g} times the cost of a sample"
    yield f"{text}."


def draw_plan(plan: Plan) -> bytes | None:
    """A PNG file: hours against cost of every size and number of nodes, with the efficient frontier.

    Returns:
        The content; None without hours or without prices, when there is nothing to draw.
    """
    from matplotlib.figure import Figure

    places = [each for each in plan.of_places() if each.has_end]
    if not places:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name in dict.fromkeys(each.size.name for each in places):
        own = sorted((each for each in places if each.size.name == name), key=lambda each: each.nodes)
        axes.plot(*_points(own), "o-", alpha=0.6, label=name)
    best = frontier(places)
    axes.plot(*_points(best), "k--", label="efficient frontier")
    for each in best:
        axes.annotate(f"{each.nodes}", (each.hours or 0.0, each.cost or 0.0), textcoords="offset points", xytext=(4, 4))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("hours")
    axes.set_ylabel(f"cost, {_currency(plan)}")
    axes.set_title(f"{plan.workload.recipe}: numbers are nodes")
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
    return [each.hours or 0.0 for each in candidates], [each.cost or 0.0 for each in candidates]
