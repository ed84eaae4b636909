"""Hyperparameters in the form in which a tracking store takes them."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict

from azureml_strategy.cluster.redaction import redact, redact_text
from azureml_strategy.tracking.limits import AZURE_PARAMS_PER_RUN, PARAM_VALUE_LENGTH
from azureml_strategy.tracking.names import clean_name


def as_texts(params: dict[str, Any] | Namespace) -> dict[str, str]:
    """Nested hyperparameters as flat `a/b` names with text values, without secrets, cut to what stores accept."""
    flat = _flatten_dict(redact("", _convert_params(params)))
    return {clean_name(name): redact_text(str(value))[:PARAM_VALUE_LENGTH] for name, value in flat.items()}


def new_params(recorded: Mapping[str, str], params: Mapping[str, str]) -> dict[str, str]:
    """Those that the run does not have yet.

    A store never changes a parameter, and a retried or resumed job logs into the same run: the first value stays.
    """
    changed = [name for name, value in params.items() if recorded.get(name, value) != value]
    if changed:
        kept = ", ".join(f"{name}={redact(name, recorded[name])} (now {params[name]})" for name in changed[:5])
        warnings.warn(
            f"The run already has other values of {len(changed)} hyperparameter(s), and MLflow never changes one: "
            f"the first stay, {kept}{', ...' if len(changed) > 5 else ''}. A run of its own records the new ones.",
            stacklevel=4,
        )
    return {name: value for name, value in params.items() if name not in recorded}


def fit_azure(recorded: Mapping[str, str], params: dict[str, str]) -> dict[str, str]:
    """As many as Azure ML still takes into the run, in order."""
    room = max(AZURE_PARAMS_PER_RUN - len(recorded), 0)
    if len(params) > room:
        warnings.warn(
            f"Azure ML takes {AZURE_PARAMS_PER_RUN} hyperparameters a run: the last {len(params) - room} are not "
            f"logged, from {list(params)[room]} on. Log the rest as a file: logger.experiment.log_dict(...).",
            stacklevel=4,
        )
    return dict(list(params.items())[:room])
