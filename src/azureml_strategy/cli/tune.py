"""tune RECIPE: finds the fastest communication settings of DDP for a recipe, on the processes of a job."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from azureml_strategy.cli.verbs import Verbs, add_recipe_arguments, add_unparsed_verb, fail, word_parser

_DESCRIPTION = """\
Measure communication settings of DDP with a recipe's model and first batch: bucket sizes, how gradients are kept, and
on request compression. Run it as each of a job's processes, as training is."""
_EPILOG = """\
examples, each as the command of a job:
  azureml-strategy tune resnet50_ddp                       # settings that change no result
  azureml-strategy tune resnet50_ddp --lossy bf16          # and gradients in bf16
  azureml-strategy tune resnet50_ddp data.batch_size=64 --output tuned/b64.json
and here:
  azureml-strategy emulate --nodes 2 -- azureml-strategy tune resnet50_ddp trainer=cpu
Then train with them: azureml-strategy train resnet50_ddp strategy.tuned=outputs/tuned_ddp.json
"""
# A run of one step, whose model is not kept.
_ONE_STEP = (
    *("strategy.tune=true", "resume=never", "checkpoint=none"),
    *("++trainer.max_steps=1", "++trainer.limit_val_batches=0", "++trainer.num_sanity_val_steps=0"),
    # A report of one step would say nothing about the settings.
    *("++tracking.report=null", "++tracking.page=null", "++tracking.progress_bar=null"),
)


def add_to(verbs: Verbs) -> None:
    """Add the verb."""
    add_unparsed_verb(verbs, "tune", _run, "find the fastest communication settings of DDP", _DESCRIPTION)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the verb's words."""
    parser = word_parser(
        "tune", usage="%(prog)s RECIPE [KEY=VALUE ...] [options]", description=_DESCRIPTION, epilog=_EPILOG
    )
    add_recipe_arguments(parser, nargs="*", help="what to change, in Hydra's notation")
    parser.add_argument("--lossy", metavar="NAMES", help="allow compression: all, or some of bf16,fp16,powersgd")
    parser.add_argument("--static-graph", action="store_true", help="allow static_graph; if all steps use the same")
    parser.add_argument("--output", metavar="FILE.json", default="outputs/tuned_ddp.json", help="default: %(default)s")
    return parser


def _run(options: argparse.Namespace) -> int:
    from azureml_strategy.cluster.launchers import detect_ranks
    from azureml_strategy.training.app import run_recipe
    from azureml_strategy.training.recipes import RecipeError
    from azureml_strategy.training.run import speaks_for_all

    options = make_parser().parse_intermixed_args(options.words)
    output = Path(options.output).absolute()
    before = _modified_ns(output)
    lossy = "true" if options.lossy == "all" else f"[{options.lossy or ''}]"
    asked = [
        f"strategy.tuned='{output}'",
        f"strategy.tune_lossy={lossy}",
        f"strategy.tune_static_graph={str(options.static_graph).lower()}",
    ]
    # A process that the strategy starts on this node inherits the overrides of this one.
    added = [each for each in (*_ONE_STEP, *asked) if each not in options.overrides]
    try:
        run_recipe(options.recipe, [*options.overrides, *added])
    except RecipeError as error:
        other = "'strategy.tune=true' does not fit" in str(error)
        return fail(f"Only recipes with strategy=ddp can be tuned. {error}" if other else error)
    if not speaks_for_all(detect_ranks()) or _modified_ns(output) != before:
        return 0
    print("azureml-strategy: nothing was measured; see above.", file=sys.stderr)
    return 1


def _modified_ns(file: Path) -> int | None:
    """When a file was written, in nanoseconds; None if it is not there."""
    return file.stat().st_mtime_ns if file.is_file() else None
