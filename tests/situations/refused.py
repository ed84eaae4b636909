"""What a strategy refuses before the first step, by situation, with words of its message."""

from __future__ import annotations

DDP: dict[str, str] = {}

_BY_HAND = (
    "manual",
    "manual_layers",
    "manual_without_blocks",
    "manual_two_losses",
    "toggles_in_step",
    "evaluates_in_step",
    "manual_twice",
    "manual_accumulation",
    "manual_clipping",
    "two_optimizers",
    "adversaries",
    "adversaries_without_toggles",
    "own_backward",
)
_AVERAGES = ("ema_weight_averaging", "weight_averaging", "stochastic_weight_averaging")
LOCAL_SGD: dict[str, str] = {
    **dict.fromkeys(_BY_HAND, "Use automatic optimization, or strategy='azureml_ddp'"),
    **dict.fromkeys(_AVERAGES, "averages over the steps of one replica"),
    **dict.fromkeys(("closure_of_many", "line_search"), "Use another optimizer"),
    "pruning": "Prune under strategy='azureml_ddp'",
}

ZERO: dict[str, str] = {}

ZERO_3: dict[str, str] = {}

FSDP2: dict[str, str] = {
    **dict.fromkeys(("closure_of_many", "line_search"), "LBFGS makes one vector"),
    "auxiliary_loss": "optimizer replaces a penalty",
    "pruning": "Prune under strategy='azureml_ddp'",
    "teacher": "Make the copy before: in __init__",
    "torch_average": "Make the copy before: in __init__",
    "scalar_parameter": "nn.Parameter(torch.ones(1))",
    "weight_of_a_block": "Call the layer instead of using its weight",
}

_FINETUNING = ("backbone_finetuning", "own_finetuning")
TENSOR_PARALLEL: dict[str, str] = {**FSDP2, **dict.fromkeys(_FINETUNING, "Write tensor_parallel_size=1")}

PIPELINE: dict[str, str] = {}

# What has another meaning under a strategy, as its page says, and so other numbers.
OTHERWISE: dict[str, dict[str, str]] = {
    "local_sgd": {"clipping": "each replica clips the gradients of its own samples"}
}

REFUSED: dict[str, dict[str, str]] = {
    "ddp": DDP,
    "local_sgd": LOCAL_SGD,
    "zero_1": ZERO,
    "zero_2": ZERO,
    "zero_3": {**ZERO, **ZERO_3},
    "fsdp2": FSDP2,
    "tensor_parallel": TENSOR_PARALLEL,
    "pipeline": PIPELINE,
}
