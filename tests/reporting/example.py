"""A run as a job of two attempts on two nodes leaves it in MLflow, written through MLflow's own client."""

from __future__ import annotations

import json
import math
import random
import time

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

SHARES = {
    "data_wait": 0.34,
    "copy": 0.02,
    "forward": 0.17,
    "backward": 0.29,
    "communication": 0.12,
    "optimizer": 0.03,
    "other": 0.03,
}
TAGS = {
    "azureml_strategy.recipe": "resnet50_imagenet",
    "azureml_strategy.overrides": "cluster=nc96ads_a100_v4 cluster.num_nodes=2 data.num_workers=4",
    "azureml_strategy.command": "azureml-strategy train resnet50_imagenet cluster=nc96ads_a100_v4",
    "azureml_strategy.versions": "azureml-strategy 0.1.0, torch 2.13.0, lightning 2.6.6",
    "mlflow.source.git.commit": "9f1c2e7a4b6d8e0f1a2b3c4d5e6f708192a3b4c5",
    "throughput.unit": "images",
    "network.transport": "socket",
    "network.vm_size": "Standard_NC96ads_A100_v4",
    "cost.price_per_hour": "14.69",
    "cost.currency": "USD",
    "cost.source": "Azure Retail Prices",
    "cost.date": "2026-11-20",
}
PARAMS = {
    "data/num_workers": "4",
    "data/batch_size": "256",
    "data/_target_": "azureml_strategy.data.ImageFolderDataModule",
    "strategy/_target_": "azureml_strategy.strategies.AzureMLDDPStrategy",
    "trainer/precision": "bf16-mixed",
    "model/_target_": "azureml_strategy.models.ImageClassifier",
}
WINDOW = 50  # steps
STEP_S = 0.42


def log_points(client: MlflowClient, run_id: str, points: list[tuple[str, float, int, int]]) -> None:
    """Log points of name, value, step and time, in batches that MLflow takes."""
    metrics = [Metric(name, value, at, step) for name, value, step, at in points]
    for start in range(0, len(metrics), 1000):
        client.log_batch(run_id, metrics=metrics[start : start + 1000])


def log_run(store: str, name: str = "resnet50_imagenet 2 nodes", windows: int = 160, slow_rank: int | None = 5) -> str:
    """Log a run that waits for data, has a slow rank, and was preempted once; return its id."""
    client, draw = MlflowClient(store), random.Random(7)
    begin = int(time.time() * 1000) - int(windows * WINDOW * STEP_S * 1100)
    experiment = client.create_experiment(f"images {time.time_ns()}")
    run_id = client.create_run(experiment, begin, run_name=name).info.run_id
    client.log_batch(run_id, params=[Param(*each) for each in PARAMS.items()])
    client.log_batch(run_id, tags=[RunTag(*each) for each in TAGS.items()])
    at, points, ranks = begin + 45_000, [], []
    for window in range(windows):
        step = (window + 1) * WINDOW - 1
        at += int(WINDOW * STEP_S * 1000) + (240_000 if window == windows // 2 else 0)
        ranks.append(_rank_window(step, at, slow_rank if window > windows // 3 else None, draw))
        points += [(name, value, step, at) for name, value in _window(window / windows, draw).items()]
        points += [(name, value, step, at) for name, value in _times(window, windows).items()]
        points += [(f"system/{node}/{c}", v, window, at) for node in ("node-0", "node-1") for c, v in _system(draw)]
    log_points(client, run_id, points)
    log_points(client, run_id, [(name, value, 10, at) for name, value in _summary(windows).items()])
    half = begin + (at - begin) // 2
    client.log_text(run_id, _lines([("start", "Attempt 0 of this job begins.", 0, begin)]), "events/attempt_0.jsonl")
    client.log_text(run_id, _lines(_second(half, windows)), "events/attempt_1.jsonl")
    who = [{"rank": r, "host": f"node-{r // 4}", "node": r // 4, "device": f"cuda:{r % 4}"} for r in range(8)]
    for attempt, some in enumerate((ranks[: windows // 2], ranks[windows // 2 :])):
        client.log_dict(run_id, {"ranks": who, "windows": some}, f"ranks/attempt_{attempt}.json")
    client.log_dict(run_id, _NETWORK, "network.json")
    client.log_text(run_id, "seed: 42\ntrainer:\n  precision: bf16-mixed\n", "config.yaml")
    client.set_terminated(run_id, "FINISHED", at)
    return run_id


_NETWORK = {
    "backend": "nccl",
    "transport": "socket",
    "nodes": [
        {
            "host": f"node-{node}",
            "settings": [
                {"variable": "NCCL_IB_DISABLE", "value": "1", "reason": "This size has no InfiniBand."},
                {"variable": "NCCL_SOCKET_IFNAME", "value": "eth0", "reason": "The network between nodes."},
            ],
            "kept": [],
        }
        for node in range(2)
    ],
}


def _second(half: int, windows: int) -> list[tuple[str, str, int, int]]:
    middle = windows // 2 * WINDOW
    return [
        ("start", "Attempt 1 of this job begins, from the checkpoint of step 3,950.", middle, half),
        ("slow_rank", "rank 5 (node-1, cuda:1) computes 28% longer than the median rank.", middle + 500, half + 9**6),
        ("warning", "node-1: 3 symbol errors on mlx5_ib1.", middle + 900, half + 2 * 9**6),
    ]


def _lines(events: list[tuple[str, str, int, int]]) -> str:
    names = ("kind", "text", "step", "time_ms")
    return "".join(json.dumps(dict(zip(names, event, strict=True))) + "\n" for event in events)


def _window(done: float, draw: random.Random) -> dict[str, float]:
    noisy = {name: share * draw.uniform(0.92, 1.08) for name, share in SHARES.items()}
    whole = sum(noisy.values())
    rate = 4876 * draw.uniform(0.97, 1.02) * (0.93 if done > 0.33 else 1)
    loss = 6.9 * math.exp(-3.2 * done) + 0.9 + draw.uniform(-0.08, 0.08)
    return {
        **{f"step/{name}_share": share / whole for name, share in noisy.items()},
        "throughput/samples_per_second": rate,
        "throughput/samples_per_second_per_device": rate / 8,
        "throughput/step_time_median_s": 2048 / rate,
        "throughput/step_time_p95_s": 2048 / rate * draw.uniform(1.05, 1.2),
        "throughput/data_wait_share": noisy["data_wait"] / whole,
        "train/loss": loss,
        "val/loss": loss + 0.2,
        "val/top1": 0.76 * (1 - math.exp(-3 * done)),
        "lr-SGD": 0.4 * (1 + math.cos(math.pi * done)),
    }


def _times(window: int, windows: int) -> dict[str, float]:
    training = (window % (windows // 2) + 1) * WINDOW * STEP_S
    checks = window % (windows // 2) // 20
    return {
        "time/startup_s": 62.0,
        "time/training_s": training,
        "time/validation_s": 0.06 * training,
        "time/checkpoint_s": 4.0 * checks,
        "time/redone_s": 20.0 if window >= windows // 2 else 0.0,
        "time/other_s": 6.0,
        "time/goodput": 0.87,
    }


def _system(draw: random.Random) -> list[tuple[str, float]]:
    gpus = [(f"gpu_{gpu}_utilization_percentage", draw.uniform(55, 75)) for gpu in range(4)]
    return [("cpu_utilization_percentage", draw.uniform(80, 98)), ("system_memory_usage_megabytes", 2e5), *gpus]


def _summary(windows: int) -> dict[str, float]:
    return {
        **{f"summary/step/{name}_share": share for name, share in SHARES.items()},
        "summary/samples_per_second": 4700.0,
        "summary/samples_per_second_per_device": 587.5,
        "summary/step_time_median_s": STEP_S,
        "summary/step_time_p95_s": 0.51,
        "summary/mfu": 0.21,
        "summary/nodes": 2.0,
        "summary/devices": 8.0,
        "cost/run": 2 * 14.69 * windows * WINDOW * STEP_S / 3600,
        "cost/per_million_samples": 1.74,
    }


def _rank_window(step: int, at: int, slow: int | None, draw: random.Random) -> dict[str, object]:
    compute = [0.21 * draw.uniform(0.985, 1.015) * (1.28 if rank == slow else 1) for rank in range(8)]
    return {
        "step": step,
        "time_ms": at,
        "compute_s": compute,
        "data_wait_s": [0.14 * draw.uniform(0.9, 1.1) for _ in range(8)],
        "communication_s": [0.05] * 8,
        "slow": {} if slow is None else {str(slow): "compute"},
    }
