"""What a strategy refuses by situation, with words of its message: before the first step, or before a wrong one."""

from __future__ import annotations

DDP: dict[str, str] = {}

_LATER_OF_ZERO = ("toggles_in_step", "unfreezes", "freezes", "unfreezes_fit_twice", "adds_group", "adds_layer")

# What nothing tells before it happens. No step is taken that would be wrong.
STOPS_LATER: dict[str, tuple[str, ...]] = {
    "zero_1": _LATER_OF_ZERO,
    "zero_2": _LATER_OF_ZERO,
    "zero_3": _LATER_OF_ZERO,
}

LOCAL_SGD: dict[str, str] = {}

ZERO: dict[str, str] = {
    **dict.fromkeys(("two_optimizers", "adversaries"), "DeepSpeed has one optimizer"),
    "closure_of_many": "trains by LBFGS",
    **dict.fromkeys(("unfreezes", "unfreezes_fit_twice", "alternates"), "frozen after the start"),
    **dict.fromkeys(("toggles_in_step", "freezes"), "frozen after the start"),
    **dict.fromkeys(("adds_group", "adds_layer"), "parameter group was added after the start"),
    **dict.fromkeys(("backbone_finetuning", "own_finetuning"), "unfreezes parameters during the training"),
    "stochastic_weight_averaging": "Lightning does not allow with DeepSpeed",
}

_CUT = "deepspeed.zero.GatheredParameters"
ZERO_3: dict[str, str] = {
    **dict.fromkeys(("ema_weight_averaging", "weight_averaging", "pruning"), "azureml_deepspeed_stage_2"),
    **dict.fromkeys(("own_average", "torch_average", "sets_weights", "new_head", "teacher"), _CUT),
}

FSDP2: dict[str, str] = {
    "closure_of_many": "LBFGS makes one vector",
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
