"""The planner's rates beside published and measured ones, with the naive model beside it.

    python benchmarks/planned_rates.py

Fits the links of Azure's clusters of 2018 to benchmarks/published/azure_resnet50_2018.csv, once to all sizes, which
gives the numbers of planning/fitted.toml, and once without 16 GPUs, which are then predicted. And predicts one H100 and
one H200 from older GPUs' figures alone.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from harness import RESULTS, save, show
from scipy.optimize import least_squares
from torch import nn
from torch.nn.functional import cross_entropy

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.network.vm_sizes import bare_name
from azureml_strategy.planning import Network, Prediction, network_of_module, predict
from azureml_strategy.planning.fitted import Link, Parameters, default_parameters
from azureml_strategy.planning.published import published_rates

NAME = "planned_rates"
PUBLISHED = Path(__file__).parent / "published/azure_resnet50_2018.csv"
# Loops by hand on one GPU: docs/gpu.md and results/resnet50_gpu*.json. GPT in sequences of 1,024 tokens.
MEASURED = (
    ("resnet50", "H100", 256, False, 3931.0),
    ("resnet50", "H100", 256, True, 5530.0),
    ("gpt_125m", "H100", 16, False, 196_800 / 1024),
    ("gpt_125m", "H100", 16, True, 429_600 / 1024),
    ("resnet50", "H200", 256, False, 4662.0),
    ("resnet50", "H200", 256, True, 6533.0),
)
Row = Mapping[str, str]


@dataclass(frozen=True)
class Fitted:
    """Bandwidths in bytes per second, seconds, and a share, of one kind of network."""

    inside: float
    across: float
    latency_s: float
    slowdown: float
    overhead_s: float

    def link(self) -> Link:
        return Link(**asdict(self), source="")


def published(network: str, old: bool | None = None) -> list[Row]:
    """The rows of a network; K80 alone, or all others, where `old` says so."""
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["network"] == network]
    return [row for row in rows if old is None or (row["gpu"] == "K80") == old]


def predicted(row: Row, fitted: Fitted) -> Prediction:
    key = (bare_name(row["vm_size"]).lower(), row["network"])
    known: Parameters = replace(default_parameters(), links={key: fitted.link()})
    return predict(
        "resnet50",
        batch_size=64,
        vm_size=row["vm_size"],
        nodes=int(row["gpus"]) // 4,
        precision="32-true",
        optimizer="sgd",
        interconnect=row["network"],  # type: ignore[arg-type]
        parameters=known,
    )


def error(row: Row, rate: float) -> float:
    return rate / float(row["images_per_second"]) - 1


def fit(rows: Sequence[Row], make: Callable[[np.ndarray], Fitted], start: Sequence[float], pull: Any = None) -> Fitted:
    """The parameters with the least squares of relative errors, from several starts; `pull` adds residuals."""

    def residuals(given: np.ndarray) -> list[float]:
        fitted = make(given)
        errors = [math.log1p(error(row, predicted(row, fitted).samples_per_second)) for row in rows]
        return errors + ([] if pull is None else [pull(given)])

    random = np.random.default_rng(0)
    found = [least_squares(residuals, np.array(start) + random.normal(0, 0.3, len(start))) for _ in range(3)]
    return make(min(found, key=lambda each: each.cost).x)


def infiniband(given: np.ndarray) -> Fitted:
    """Intel MPI took everything through the host's memory: one bandwidth inside and between nodes."""
    bandwidth, overhead_s = np.exp(given)
    return Fitted(bandwidth, bandwidth, 0.0, 0.0, overhead_s)


def ethernet(given: np.ndarray) -> Fitted:
    inside, across, latency_s = np.exp(given[:3])
    return Fitted(inside, across, latency_s, 1 / (1 + math.exp(-given[3])), 0.0)


def fit_all(leave_out: Sequence[str] = ()) -> dict[str, Fitted]:
    """Fit each kind of network: InfiniBand, Ethernet, and Ethernet with K80, whose NCCL was slower inside a node."""

    def rows(network: str, old: bool | None) -> list[Row]:
        return [row for row in published(network, old) if row["gpus"] not in leave_out]

    over_ethernet = fit(rows("ethernet", False), ethernet, (21.7, 20.1, -6.4, -0.3))

    def like_others(given: np.ndarray) -> Fitted:
        return replace(ethernet(np.append(given, 0.0)), slowdown=over_ethernet.slowdown)

    # Three figures say little of three parameters: the latency is drawn to the others'.
    start = (18.9, 18.9, math.log(over_ethernet.latency_s))
    return {
        "infiniband": fit(rows("infiniband", None), infiniband, (20.5, -5.0)),
        "ethernet": over_ethernet,
        "ethernet, K80": fit(rows("ethernet", True), like_others, start, lambda given: 0.03 * (given[2] - start[2])),
    }


def errors_of(fitted: Mapping[str, Fitted], only: Sequence[str] = ("4", "8", "16")) -> list[dict[str, Any]]:
    found = []
    for network in ("infiniband", "ethernet"):
        for row in (each for each in published(network) if each["gpus"] in only):
            kind = f"{network}, K80" if network == "ethernet" and row["gpu"] == "K80" else network
            rates = predicted(row, fitted[kind])
            found.append(
                {
                    **row,
                    "predicted": rates.samples_per_second,
                    "error": error(row, rates.samples_per_second),
                    "naive_error": error(row, rates.naive),
                }
            )
    return found


def summary(errors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median and the worst error of each network, and of the naive model."""
    return {
        network: {
            name: {"median": median(sizes), "worst": max(sizes)}
            for name in ("error", "naive_error")
            if (sizes := [abs(each[name]) for each in errors if each["network"] == network])
        }
        for network in ("infiniband", "ethernet")
    }


class WithLoss(nn.Module):
    """The loop by hand: all logits, and their cross-entropy in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten())


def gpt_as_it_is(batch: int) -> Network:
    shape = GPTConfig(50257, 1024, 12, 768, 12, 3072, norm="layernorm", positions="learned", mlp="gelu", bias=True)
    with torch.device("meta"):
        module = LanguageModel(shape)
        module.configure_model()
        tokens = torch.zeros(batch, 1024, dtype=torch.long)
        return network_of_module(WithLoss(module), tokens, batch, "gpt_125m with 50,257 tokens")


def one_gpu() -> list[dict[str, Any]]:
    """Steps of one GPU, from what older GPUs reach."""
    found = []
    for network, gpu, batch, compiled, measured in MEASURED:
        optimizer = "sgd" if network == "resnet50" else "adam"
        # The compiler pads the vocabulary of GPT-2; without one its odd size stays.
        described = gpt_as_it_is(batch) if network == "gpt_125m" and not compiled else network
        rates = predict(described, batch_size=batch, gpu=gpu, compiled=compiled, optimizer=optimizer, anchored=False)
        found.append(
            {
                "network": network,
                "gpu": gpu,
                "compiled": compiled,
                "measured": measured,
                "predicted": rates.samples_per_second,
                "error": rates.samples_per_second / measured - 1,
                "bound_by": rates.bound_by,
            }
        )
    return found


def other_gpus() -> list[dict[str, Any]]:
    """Published rates of single GPUs, beside the roofline alone; most of them it was not fitted to."""
    found = []
    for each in published_rates():
        if each.batch is None or each.network not in ("resnet50", "resnet101", "resnet152"):
            continue
        case: dict[str, Any] = {"batch_size": each.batch, "gpu": each.gpu, "precision": each.precision}
        rates = predict(each.network, compiled=each.compiled, optimizer="sgd", anchored=False, **case)
        error = rates.samples_per_second / each.rate - 1
        found.append({"network": each.network, **case, "compiled": each.compiled, "rate": each.rate, "error": error})
    return found


def within(errors: Sequence[Mapping[str, Any]], share: float, least_batch: int) -> dict[str, Any]:
    """How many errors are below a share, of batches that fill a GPU."""
    sizes = [abs(each["error"]) for each in errors if each["batch_size"] >= least_batch]
    return {"rates": len(sizes), "median": median(sizes), f"within_{share}": sum(each < share for each in sizes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--without-fit", action="store_true", help="only the GPUs")
    options = parser.parse_args()
    others = other_gpus()
    figures: dict[str, Any] = {"one_gpu": one_gpu(), "other_gpus": others}
    figures["other_gpus_summary"] = {"all": within(others, 0.3, 1), "batches of 32 and more": within(others, 0.3, 32)}
    if not options.without_fit:
        fitted, held_out = fit_all(), fit_all(leave_out=["16"])
        errors, kept_back = errors_of(fitted), errors_of(held_out, ["16"])
        figures |= {
            "fitted": {name: asdict(each) for name, each in fitted.items()},
            "published": errors,
            "published_summary": summary(errors),
            "held_out_16_gpus": kept_back,
            "held_out_summary": summary(kept_back),
        }
    rows = [
        (each["network"], each["gpu"], "compiled" if each["compiled"] else "eager", f"{each['error']:+.1%}")
        for each in figures["one_gpu"]
    ]
    show("One GPU, predicted from older ones", ("network", "GPU", "mode", "error"), rows)
    save(NAME, {"published": PUBLISHED.name}, figures, options.results)


if __name__ == "__main__":
    main()
