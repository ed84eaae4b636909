"""plan RECIPE: what a run takes and costs on any Azure size; sizes: the sizes themselves."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_strategy.cli.verbs import Verbs, add_unparsed_verb, add_verb, fail, print_text, word_parser

if TYPE_CHECKING:
    from azureml_strategy.cluster.job import Price
    from azureml_strategy.network.vm_sizes import VMSize
    from azureml_strategy.planning.calibration import Calibration, Observed
    from azureml_strategy.planning.candidates import Plan, Wanted

_DESCRIPTION = (
    "Predict speed, hours and cost of a recipe on Azure's GPU sizes. Nothing is started and no GPU is needed."
)
_EPILOG = """\
examples:
  azureml-strategy plan resnet50_imagenet --nodes 1,2,4 --price nd96isr_h100_v5=98.32
  azureml-strategy plan gpt_zero3 model=gpt_7b --sizes nd96isr_h100_v5,nd96amsr_a100_v4 --region eastus --deadline 24
  azureml-strategy plan resnet50_imagenet --step-ms 66 --measured-on H100 --rank time
  azureml-strategy plan gpt_zero3 model=gpt_1b --sizes nd96isr_h100_v5 --nodes 8 --strategies deepspeed_stage_3 --try
  azureml-strategy plan resnet50_imagenet --calibrate 0a1b2c3d 4e5f6a7b --save-calibration ours.json
  azureml-strategy sizes --gpu H100 --infiniband
Ranges say how sure it is; docs/plan.md says how it is computed and what it was checked against.
"""


def add_to(verbs: Verbs) -> None:
    """Add both verbs."""
    add_unparsed_verb(verbs, "plan", _run, "predict speed, hours and cost of a recipe on Azure's sizes", _DESCRIPTION)
    summary = "list Azure's GPU sizes and the speed to expect of them"
    sizes = add_verb(verbs, "sizes", _run_sizes, summary)
    sizes.add_argument("--gpu", metavar="MODEL", help="only those of this model, such as H100")
    sizes.add_argument("--infiniband", action="store_true", help="only those with InfiniBand")
    sizes.add_argument("--retired", action="store_true", help="also those that Azure no longer offers")
    _add_prices(sizes)
    sizes.add_argument("--json", action="store_true", help="print JSON")


def _add_prices(parser: argparse.ArgumentParser) -> None:
    prices = parser.add_argument_group("prices", "of one node and hour; without any there is no cost")
    prices.add_argument("--price", metavar="SIZE=X", action="append", default=[], help="what you pay; may be repeated")
    prices.add_argument(
        "--region", metavar="NAME", help="ask Azure's public price list for this region, such as eastus"
    )
    prices.add_argument("--tier", default="dedicated", help="dedicated (default) or low_priority, of that list")
    prices.add_argument("--currency", default="USD", metavar="CODE", help="of both (default %(default)s)")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the words of `plan`."""
    parser = word_parser(
        "plan", usage="%(prog)s RECIPE [KEY=VALUE ...] [options]", description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("recipe", metavar="RECIPE", help="name of a shipped recipe, or path of a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what to change in it")
    parser.add_argument("--sizes", metavar="SIZE,SIZE", help="VM sizes (default: all that Azure offers)")
    parser.add_argument("--nodes", default="1,2,4,8", metavar="N,N", help="numbers of nodes (default %(default)s)")
    parser.add_argument(
        "--strategies", metavar="NAME,NAME", help="files of conf/strategy (default: what needs no setting)"
    )
    parser.add_argument("--rank", choices=("cost", "time"), default="cost", help="what is best (default: the cheapest)")
    parser.add_argument("--budget", type=float, metavar="X", help="the most that the run may cost")
    parser.add_argument("--deadline", type=float, metavar="HOURS", help="the most hours that it may take")
    parser.add_argument("--samples", type=float, metavar="N", help="samples of the whole run, if the recipe says none")
    measured = parser.add_argument_group("measured", "in place of what the planner would assume")
    measured.add_argument(
        "--step-ms", type=float, metavar="X", help="one batch of the recipe on one GPU with the optimizer, ms"
    )
    measured.add_argument("--measured-on", metavar="GPU", help="the GPU of --step-ms, such as H100")
    measured.add_argument("--loader-rate", type=float, metavar="X", help="samples per second that the data gives a GPU")
    measured.add_argument("--bench", type=Path, metavar="FILE", help="JSON of `bench` on several nodes")
    _add_calibration(parser)
    _add_prices(parser)
    parser.add_argument(
        "--try", action="store_true", dest="tried", help="start the first candidate here, on ranks that are not there"
    )
    parser.add_argument("--rows", type=int, default=12, metavar="N", help="rows of the table (default %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write every candidate")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw hours against cost")
    return parser


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("calibration", "the planner's numbers, fitted to runs of yours")
    own.add_argument(
        "--calibrate",
        nargs="+",
        default=[],
        metavar="RUN",
        help="run ids or run folders, or one file of --save-calibration; write them after the overrides",
    )
    own.add_argument("--store", metavar="URI", help="where the runs are; azureml is the configured workspace")
    own.add_argument("--save-calibration", type=Path, metavar="FILE.json", help="write it, to be used again")


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.bench.options import BenchError
    from azureml_strategy.jobs import JobError
    from azureml_strategy.planning.candidates import make_plan
    from azureml_strategy.planning.errors import PlanError
    from azureml_strategy.planning.page import print_plan
    from azureml_strategy.planning.workload import read_workload
    from azureml_strategy.reporting.stores import ReportError
    from azureml_strategy.tracking.store import TrackingError
    from azureml_strategy.training.recipes import RecipeError

    parsed = make_parser().parse_intermixed_args(options.words)
    try:
        wanted = _wanted(parsed)
        workload = read_workload(parsed.recipe, parsed.overrides)
        calibration = _calibration(parsed)
        known = calibration.parameters if calibration else None
        plan = make_plan(workload, wanted, _price_finder(parsed), known)
        if not plan.candidates:
            raise PlanError(f"Nothing can be planned. {' '.join(plan.left_out[:3])}")
        written = _write(plan, calibration, parsed)
        if calibration:
            print_text("\n".join(calibration.lines()))
        print_plan(plan, parsed.rows, ", ".join(written))
        return _try(plan) if parsed.tried else 0
    except (PlanError, JobError, BenchError, RecipeError, ReportError, TrackingError, OSError) as error:
        return fail(error)


def _calibration(options: argparse.Namespace) -> Calibration | None:
    """The calibration that was asked for, from runs or from a file; None without one."""
    from azureml_strategy.planning.calibration import calibrate
    from azureml_strategy.planning.calibration_file import read_calibration, write_calibration
    from azureml_strategy.planning.errors import PlanError

    if not options.calibrate:
        if options.save_calibration or options.store:
            raise PlanError("--save-calibration and --store belong to --calibrate RUN [RUN ...], which is missing.")
        return None
    files = [Path(each) for each in options.calibrate if Path(each).is_file()]
    if files and len(options.calibrate) > 1:
        raise PlanError(f"{files[0]} is a file, and a calibration is made of runs or is one file. Name it alone.")
    if files:
        found = read_calibration(files[0].read_text(encoding="utf-8", errors="replace"), str(files[0]))
    else:
        found = calibrate(_observed(options))
    if options.save_calibration:
        from azureml_strategy.files import write_atomically

        write_atomically(options.save_calibration, write_calibration(found))
    return found


def _observed(options: argparse.Namespace) -> list[Observed]:
    """What the named runs measured; it prints why others of them cannot be used."""
    from azureml_strategy.cli.report import find_run
    from azureml_strategy.command_line import is_override
    from azureml_strategy.planning.errors import PlanError
    from azureml_strategy.planning.observed_runs import observe_runs
    from azureml_strategy.reporting.stores import open_store

    change = next(filter(is_override, options.calibrate), None)
    if change is not None:
        raise PlanError(f"{change} is no run. Write what is changed in the recipe before --calibrate.")
    places = [find_run(each, options.store) for each in options.calibrate]
    stores = {uri: open_store(uri) for uri in dict.fromkeys(uri for _, uri in places)}
    found, left_out = observe_runs([stores[uri].run(run_id) for run_id, uri in places], options.recipe)
    if not found:
        raise PlanError(
            f"No run can be calibrated on. {' '.join(left_out)} Name finished runs of recipes on Azure's GPUs."
        )
    for sentence in left_out:
        print_text(sentence)
    return found


def _try(plan: Plan) -> int:
    """Take the first steps of the best candidate on ranks that are not there; 1 if it would not start."""
    from azureml_strategy.planning.commands import recipe_overrides
    from azureml_strategy.planning.preflight import try_recipe

    best = plan.candidates[0]
    overrides = recipe_overrides(plan.workload, best)
    tried = try_recipe(plan.workload.recipe, overrides, best.nodes, best.prediction.gpus // best.nodes)
    print_text("\n".join(tried.lines()))
    return 0 if tried.starts else 1


def _wanted(options: argparse.Namespace) -> Wanted:
    from azureml_strategy.jobs.resources import find_size, offered_sizes
    from azureml_strategy.planning.candidates import Wanted
    from azureml_strategy.planning.errors import PlanError
    from azureml_strategy.planning.predict import MeasuredStep

    for name in ("budget", "deadline", "samples", "step_ms", "loader_rate", "rows"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"--{name.replace('_', '-')} is {value}. Give a number above 0.")
    if options.step_ms is not None and options.measured_on is None:
        raise PlanError("--step-ms needs --measured-on GPU, such as H100: the GPU on which it was measured.")
    named = [each.strip() for each in (options.sizes or "").split(",") if each.strip()]
    measured = None if options.step_ms is None else MeasuredStep(options.step_ms / 1e3, options.measured_on)
    return Wanted(
        sizes=[find_size(each) for each in named] or [each for each in offered_sizes() if each.gpus],
        nodes=_numbers(options.nodes),
        strategies=[each.strip() for each in (options.strategies or "").split(",") if each.strip()],
        budget=options.budget,
        deadline=options.deadline,
        rank=options.rank,
        samples=options.samples,
        measured=measured,
        loader_rate=options.loader_rate,
        tier=options.tier,
        **_benched(options.bench),
    )


def _numbers(text: str) -> list[int]:
    from azureml_strategy.planning.errors import PlanError

    try:
        return [int(each) for each in text.split(",")]
    except ValueError as error:
        raise PlanError(f"--nodes is {text!r}. Write numbers with commas: 1,2,4.") from error


def _benched(file: Path | None) -> dict[str, Any]:
    """Bus bandwidth of the largest all-reduce in a file of `bench`, in GB/s, and the VM size that the file names."""
    from azureml_strategy.bench.results import Sweep, read_results
    from azureml_strategy.planning.errors import PlanError

    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{file} is no JSON ({error}). Give the file of `azureml-strategy bench --output`.") from error
    results = read_results(content)
    largest = results.measured.largest("all-reduce") if isinstance(results.measured, Sweep) else None
    if largest is None:
        raise PlanError(f"{file} has no all-reduce. Run `azureml-strategy bench` on the nodes without --pairs.")
    return {"across_gb": largest.bus_bandwidth, "across_of": results.conditions.vm_size}


def _price_finder(options: argparse.Namespace) -> Callable[[VMSize], Price | None]:
    """Find prices: those given, then those of Azure's list for the region, which is asked until it gives no answer."""
    from azureml_strategy.cluster.job import Price
    from azureml_strategy.jobs.prices import PriceList
    from azureml_strategy.network.vm_sizes import lookup_vm_size
    from azureml_strategy.planning.errors import PlanError

    given: dict[str, Price] = {}
    for text in options.price:
        name, _, value = text.partition("=")
        try:
            given[lookup_vm_size(name).name] = Price(float(value), options.currency, "--price")
        except (ValueError, LookupError) as error:
            raise PlanError(f"--price {text}: {error}. Write --price SIZE=X, X for a node and hour.") from error
    prices = PriceList(options.region, options.tier, options.currency)
    return lambda size: given.get(size.name) or prices.price_of(size)


def _write(plan: Plan, calibration: Calibration | None, options: argparse.Namespace) -> list[str]:
    from azureml_strategy.files import write_atomically
    from azureml_strategy.planning.calibration_file import calibration_values
    from azureml_strategy.planning.errors import PlanError
    from azureml_strategy.planning.page import draw_plan
    from azureml_strategy.planning.plan_json import as_json

    written = [] if options.save_calibration is None else [str(options.save_calibration)]
    if options.output is not None:
        content = as_json(plan) | {"calibration": calibration and calibration_values(calibration)}
        write_atomically(options.output, json.dumps(content, indent=2).encode())
        written.append(str(options.output))
    if options.plot is not None:
        drawn = draw_plan(plan)
        if drawn is None:
            raise PlanError("There is no picture without hours and cost: give --samples N, and --price or --region.")
        write_atomically(options.plot, drawn)
        written.append(str(options.plot))
    return written


def _run_sizes(options: argparse.Namespace) -> int:
    from azureml_strategy.jobs import JobError
    from azureml_strategy.planning.errors import PlanError
    from azureml_strategy.planning.size_table import list_sizes, size_lines
    from azureml_strategy.tracking.tables import render_table

    try:
        rows = list_sizes(options.gpu, options.infiniband, _price_finder(options), options.retired)
    except (PlanError, JobError) as error:
        return fail(error)
    headings, lines = size_lines(rows)
    if options.json:
        print_text(json.dumps([dict(zip(headings, line, strict=True)) for line in lines], indent=2))
    else:
        print_text(render_table(headings, lines, "No size is like that."))
    return 0
