"""Azure ML's own sweeps: one job that starts trials, each with other hyperparameters, and stops those that lag."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from azureml_strategy.jobs.azure_internals import standalone_job
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.training.recipes import near_matches

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command
    from azure.ai.ml.sweep import SweepJob

SAMPLINGS = ("random", "grid", "bayesian")
GOALS = ("minimize", "maximize")
# Stands in place of a hyperparameter for all that DeepSpeed's own autotuner tries for the recipe's ZeRO stage.
AUTOTUNING = "autotuning"
# The arguments of each distribution, in order, as the classes of azure.ai.ml.sweep name them.
_DISTRIBUTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "uniform": ("Uniform", ("min_value", "max_value")),
    "loguniform": ("LogUniform", ("min_value", "max_value")),
    "quniform": ("QUniform", ("min_value", "max_value", "q")),
    "qloguniform": ("QLogUniform", ("min_value", "max_value", "q")),
    "normal": ("Normal", ("mu", "sigma")),
    "lognormal": ("LogNormal", ("mu", "sigma")),
    "qnormal": ("QNormal", ("mu", "sigma", "q")),
    "qlognormal": ("QLogNormal", ("mu", "sigma", "q")),
    "randint": ("Randint", ("upper",)),
}
# The first five evaluations stop no trial: a metric is noisy at its beginning.
_EVALUATIONS: dict[str, float] = {"evaluation_interval": 1, "delay_evaluation": 5}
# Class and defaults of each policy.
_POLICIES: dict[str, tuple[str, dict[str, float]]] = {
    "bandit": ("BanditPolicy", {"slack_factor": 0.1, **_EVALUATIONS}),
    "median": ("MedianStoppingPolicy", _EVALUATIONS),
    "truncation": ("TruncationSelectionPolicy", {"truncation_percentage": 20, **_EVALUATIONS}),
}
# Azure ML's guide on tuning hyperparameters names these for Bayesian sampling.
_BAYESIAN = ("choice", "uniform", "quniform")
_TRIALS = 20  # by default
_PLAIN_TEXT = re.compile(r"[\w.+/-]+")
# What a sweep has of the job of its trials.
_OF_THE_TRIAL = (
    *("name", "display_name", "experiment_name", "description", "tags", "identity", "inputs", "outputs"),
    *("compute", "resources", "queue_settings"),
)


@dataclass(frozen=True)
class Parameter:
    """A hyperparameter.

    Attributes:
        key: what the user calls it: a key of the recipe, or an option of the program without its dashes.
        kind: `choice` or one of the distributions.
        values: the values of a choice, or the arguments of the distribution.
    """

    key: str
    kind: str
    values: tuple[float | str, ...]

    @property
    def name(self) -> str:
        """The name in the search space, where Azure ML takes letters, digits and underscores."""
        return re.sub(r"\W", "_", self.key)


@dataclass(frozen=True)
class Sweep:
    """A search for hyperparameters.

    Attributes:
        parameters: what is varied.
        sampling: `random`, `grid` or `bayesian`.
        stop: the policy that ends trials early: `bandit`, `median` or `truncation`, with arguments or without, such as
            `bandit(slack_factor=0.2, evaluation_interval=2, delay_evaluation=10)`; None ends none.
        metric: the logged metric that is to be the best; None is what the recipe's checkpoints monitor.
        goal: `minimize` or `maximize`; None is the recipe's.
        trials: trials in all; None is 20, or all combinations of a grid.
        concurrent: trials at a time.
    """

    parameters: Sequence[Parameter] = ()
    sampling: str = "random"
    stop: str | None = None
    metric: str | None = None
    goal: str | None = None
    trials: int | None = None
    concurrent: int = 4

    def __post_init__(self) -> None:
        names = [parameter.name for parameter in self.parameters]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise JobError(f"--sweep gives {twice} twice. Name each hyperparameter once.")
        words = [
            ("--sampling", self.sampling, SAMPLINGS),
            *([("--goal", self.goal, GOALS)] if self.goal is not None else []),
        ]
        for option, word, known in words:
            if word not in known:
                raise JobError(f"{option} {word} is unknown. Known: {', '.join(known)}.")
        ranges = [parameter.key for parameter in self.parameters if parameter.kind != "choice"]
        if self.sampling == "grid" and ranges:
            raise JobError(
                f"--sampling grid tries all values, and {ranges[0]} is a range. Write {ranges[0]}=choice(...)."
            )
        for option, number in (("--trials", self.trials), ("--concurrent", self.concurrent)):
            if number is not None and not 1 <= number <= 1000:
                raise JobError(f"{option} {number} is out of range: Azure ML takes 1 to 1000.")

    def warnings(self) -> list[str]:
        """What Azure ML may refuse according to its documentation."""
        if self.sampling != "bayesian":
            return []
        others = [f"{each.key}={each.kind}" for each in self.parameters if each.kind not in _BAYESIAN]
        found = []
        if others:
            found.append(
                f"sweep: Azure ML's guide names {', '.join(_BAYESIAN)} for Bayesian sampling, not "
                f"{', '.join(others)}; if it refuses, take --sampling random"
            )
        if self.stop:
            found.append(
                "sweep: the former SDK took no early stop with Bayesian sampling; if Azure ML refuses, leave --stop out"
            )
        return found


def parse_parameter(text: str) -> Parameter:
    """Parse `KEY=choice(a, b)`, `KEY=loguniform(1e-4, 1e-1)` and the other distributions, or the word `autotuning`.

    The bounds of `loguniform` and `qloguniform` are those of the value itself. Azure ML takes their logarithms.

    Raises:
        JobError: the text is no hyperparameter; the message shows how one is written.
    """
    if text == AUTOTUNING:
        return Parameter(text, text, ())
    key, equals, expression = text.partition("=")
    key = key.strip().lstrip("-")
    if not (key and equals) or not re.fullmatch(r"[A-Za-z_][\w.-]*", key):
        raise JobError(f"--sweep {text!r} names no hyperparameter. Write KEY=choice(1, 2) or KEY=uniform(0, 1).")
    kind, values, named = _parse_call(f"--sweep {text!r}", expression)
    if kind == "choice":
        return Parameter(key, kind, _parse_choice(text, values, named))
    if kind not in _DISTRIBUTIONS:
        raise JobError(f"--sweep {text!r}: there is no {kind!r}. {near_matches(kind, ['choice', *_DISTRIBUTIONS])}")
    names = _DISTRIBUTIONS[kind][1]
    numbers = dict(zip(names, values, strict=False)) | named
    if len(values) > len(names) or set(numbers) != set(names):
        raise JobError(f"--sweep {text!r}: {kind} takes {kind}({', '.join(names)}).")
    return Parameter(key, kind, _parse_range(text, kind, [numbers[name] for name in names]))


def _parse_choice(text: str, values: Sequence[Any], named: Mapping[str, Any]) -> tuple[float | str, ...]:
    single = values[0] if len(values) == 1 and isinstance(values[0], (list, tuple, range)) else values
    wrong = [each for each in single if not isinstance(each, (bool, int, float, str))]
    if named or wrong or not single:
        raise JobError(f"--sweep {text!r}: choice takes numbers and texts, as choice(16, 32) or choice(adam, sgd).")
    unsafe = [each for each in single if isinstance(each, str) and not _PLAIN_TEXT.fullmatch(each)]
    if unsafe:
        raise JobError(
            f"--sweep {text!r}: Azure ML writes {unsafe[0]!r} into the command as it is, where the shell would read "
            "its spaces or signs. Take letters, digits and . + / _ -."
        )
    return tuple(single)


def _parse_range(text: str, kind: str, given: Sequence[Any]) -> tuple[float, ...]:
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in given):
        raise JobError(f"--sweep {text!r}: {kind} takes numbers.")
    low, high = (given[0], given[1]) if "uniform" in kind else (0, 1)
    if low >= high:
        raise JobError(f"--sweep {text!r}: the lower bound {low} is not below the upper one {high}.")
    if "loguniform" in kind:
        if low <= 0:
            raise JobError(f"--sweep {text!r}: the bounds of {kind} are those of the value itself, and above 0.")
        return (math.log(low), math.log(high), *given[2:])
    if kind != "randint" and "uniform" not in kind and given[1] <= 0:
        raise JobError(f"--sweep {text!r}: sigma is {given[1]}, and must be above 0.")
    return tuple(given)


def _parse_call(place: str, text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Parse `name` or `name(1, word, key=2)` into the name, the values and the named values."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, [], {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {str(each.arg): _constant(each.value) for each in node.keywords}
            return node.func.id, [_constant(each) for each in node.args], named
    except (SyntaxError, ValueError) as error:
        raise JobError(f"{place} cannot be read: {error}. Write NAME(VALUE, VALUE), such as uniform(0, 1).") from error
    raise JobError(f"{place} cannot be read. Write NAME(VALUE, VALUE), such as uniform(0, 1).")


def _constant(node: ast.expr) -> Any:
    """A number, text, list or range; a bare word is text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_constant(each) for each in node.elts]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        return range(*(ast.literal_eval(each) for each in node.args))
    return ast.literal_eval(node)


def autotuning_parameters(stage: int, batch_size: int) -> list[Parameter]:
    """What DeepSpeed's autotuner tries for a ZeRO stage (1 to 3), as hyperparameters of a recipe.

    Of the batch size, which counts samples per rank, the half and the double are tried as well.
    """
    with redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output, which is for the job's YAML
        from deepspeed.autotuning import constants

    space: dict[str, Any] = getattr(constants, f"DEFAULT_TUNING_SPACE_ZERO_{stage}")["zero_optimization"]
    found = [
        Parameter("data.batch_size", "choice", tuple(sorted({max(batch_size // 2, 1), batch_size, 2 * batch_size})))
    ]
    for key, values in space.items():
        if isinstance(values, list):
            # DeepSpeed writes sizes as 5e8, and takes integers.
            whole = (int(each) if isinstance(each, float) and each.is_integer() else each for each in values)
            found.append(Parameter(f"strategy.{key}", "choice", tuple(whole)))
    return found


def build_sweep(job: Command, sweep: Sweep) -> SweepJob:
    """Make a sweep whose trials are the given job; its command refers to `${{search_space.NAME}}`.

    Raises:
        JobError: the metric or the goal is missing, or a policy or an output is invalid.
    """
    from azure.ai.ml.sweep import Objective, SweepJob, SweepJobLimits

    if not sweep.metric or not sweep.goal:
        raise JobError(
            "A sweep needs to know which trial is the best: --metric NAME and --goal minimize or maximize, where NAME "
            "is what the program logs, such as val/loss."
        )
    trial: Any = standalone_job(job)
    for name, output in trial.outputs.items():
        if output.path and "${{name}}" not in output.path:
            raise JobError(
                f"All trials would write into {output.path}. Each gets a folder of its own without "
                f"job.outputs.{name}.path, or with \\${{{{name}}}} in it, which stands for the trial's name."
            )
    timeout = trial.limits.timeout if trial.limits else None
    combinations = math.prod(len(parameter.values) for parameter in sweep.parameters)
    trials = sweep.trials or (combinations if sweep.sampling == "grid" else _TRIALS)
    return SweepJob(
        **{name: getattr(trial, name) for name in _OF_THE_TRIAL},
        trial=trial,
        search_space={parameter.name: _distribution(parameter) for parameter in sweep.parameters},
        sampling_algorithm=sweep.sampling,
        objective=Objective(goal=sweep.goal, primary_metric=sweep.metric),
        early_termination=_stop_policy(sweep.stop),
        limits=SweepJobLimits(
            max_total_trials=trials, max_concurrent_trials=min(sweep.concurrent, trials), trial_timeout=timeout
        ),
    )


def _distribution(parameter: Parameter) -> Any:
    from azure.ai.ml import sweep

    if parameter.kind == "choice":
        return sweep.Choice(values=list(parameter.values))
    kind, names = _DISTRIBUTIONS[parameter.kind]
    return getattr(sweep, kind)(**dict(zip(names, parameter.values, strict=True)))


def _stop_policy(text: str | None) -> Any:
    from azure.ai.ml import sweep

    if text is None:
        return None
    name, values, named = _parse_call(f"--stop {text!r}", text)
    if name not in _POLICIES:
        raise JobError(f"--stop {text!r}: there is no {name!r}. {near_matches(name, _POLICIES)}")
    kind, settings = _POLICIES[name]
    known = [*settings, *(["slack_amount"] if name == "bandit" else [])]
    wrong = [each for each in named if each not in known]
    if values or wrong or not all(isinstance(each, (int, float)) for each in named.values()):
        raise JobError(f"--stop {text!r}: {name} takes numbers by name: {', '.join(known)}.")
    if "slack_amount" in named:
        settings = {key: value for key, value in settings.items() if key != "slack_factor"}
    return getattr(sweep, kind)(**settings | named)
