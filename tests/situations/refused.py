"""What a strategy refuses by situation, with words of its message: before the first step, or before a wrong one."""

from __future__ import annotations

DDP: dict[str, str] = {}

_BY_HAND = (
    "manual",
    "manual_layers",
    "clamps_gradients",
    "manual_without_blocks",
    "manual_two_losses",
    "toggles_in_step",
    "evaluates_in_step",
    "manual_twice",
    "manual_discards",
    "manual_accumulation",
    "manual_clipping",
    "two_optimizers",
    "adversaries",
    "adversaries_without_toggles",
    "own_backward",
    "experts_by_hand",
)
_AVERAGES = ("ema_weight_averaging", "weight_averaging", "stochastic_weight_averaging")
LOCAL_SGD: dict[str, str] = {
    **dict.fromkeys(_BY_HAND, "Use automatic optimization, or strategy='azureml_ddp'"),
    **dict.fromkeys(_AVERAGES, "averages over the steps of one replica"),
    **dict.fromkeys(("closure_of_many", "line_search"), "Use another optimizer"),
    "pruning": "Prune under strategy='azureml_ddp'",
}
_LATER_OF_ZERO = (
    *("toggles_in_step", "unfreezes", "freezes", "unfreezes_fit_twice", "adds_group", "adds_layer"),
    *("unfreezes_in_step", "freezes_in_accumulation"),
)

# What nothing tells before it happens. No step is taken that would be wrong.
STOPS_LATER: dict[str, tuple[str, ...]] = {
    "zero_1": _LATER_OF_ZERO,
    "zero_2": _LATER_OF_ZERO,
    "zero_3": _LATER_OF_ZERO,
    "fsdp2": ("replaces_data",),
    "tensor_parallel": ("replaces_data",),
    "pipeline": ("adds_layer", "unfreezes_in_step"),
}


ZERO: dict[str, str] = {
    **dict.fromkeys(("two_optimizers", "adversaries", "adversaries_without_toggles"), "DeepSpeed has one optimizer"),
    **dict.fromkeys(("closure_of_many", "line_search"), "trains by LBFGS"),
    "own_backward": "self.manual_backward(loss)",
    **dict.fromkeys(("unfreezes", "unfreezes_fit_twice", "alternates"), "after the start, but DeepSpeed goes on"),
    **dict.fromkeys(
        ("toggles_in_step", "unfreezes_in_step", "freezes", "freezes_in_accumulation"),
        "after the start, but DeepSpeed goes on",
    ),
    **dict.fromkeys(("adds_group", "adds_layer"), "A parameter group was added"),
    **dict.fromkeys(("backbone_finetuning", "own_finetuning"), "unfreezes parameters during the training"),
    "pruning": "Prune under strategy='azureml_ddp'",
    "scalar_parameter": "nn.Parameter(torch.ones(1))",
    "stochastic_weight_averaging": "Lightning does not allow with DeepSpeed",
}

_CUT = "deepspeed.zero.GatheredParameters"
ZERO_3: dict[str, str] = {
    "auxiliary_loss": "weight_decay of the optimizer replaces a penalty",
    **dict.fromkeys(("ema_weight_averaging", "weight_averaging"), "azureml_deepspeed_stage_2"),
    **dict.fromkeys(("own_average", "torch_average", "sets_weights", "new_head", "teacher"), _CUT),
}

FSDP2: dict[str, str] = {
    **dict.fromkeys(("closure_of_many", "line_search"), "LBFGS makes one vector"),
    "auxiliary_loss": "optimizer replaces a penalty",
    "replaces_data": "Write `parameter.data.copy_(...)`",
    "pruning": "Prune under strategy='azureml_ddp'",
    "teacher": "Make the copy before: in __init__",
    "torch_average": "Make the copy before: in __init__",
    "scalar_parameter": "nn.Parameter(torch.ones(1))",
    "weight_of_a_block": "Call the layer instead of using its weight",
}

_FINETUNING = ("backbone_finetuning", "own_finetuning")
TENSOR_PARALLEL: dict[str, str] = {
    **FSDP2,
    **dict.fromkeys(_FINETUNING, "Write tensor_parallel_size=1"),
    "auxiliary_loss": "`parameter.full_tensor()`",
}

_MANUAL = (
    *(
        "manual",
        "manual_layers",
        "adversaries_without_toggles",
        "own_backward",
        "clamps_gradients",
        "manual_without_blocks",
        "manual_two_losses",
        "toggles_in_step",
        "evaluates_in_step",
        "experts_by_hand",
    ),
    *("manual_twice", "manual_discards", "manual_accumulation", "manual_clipping", "two_optimizers", "adversaries"),
)
_COPIES = ("ema_weight_averaging", "weight_averaging", "stochastic_weight_averaging", "pruning")
_OUTSIDE = (
    *(
        "own_parameter",
        "momentum_teacher",
        "second_name",
        "bare_parameters",
        "scalar_parameter",
        "unused",
    ),
    "loss_of_a_layer",
)
PIPELINE: dict[str, str] = {
    **dict.fromkeys(_MANUAL, "Leave automatic_optimization at True"),
    **dict.fromkeys(("layers_called", "layers_called_fit_twice", "teacher"), "is on another stage of the pipeline"),
    **dict.fromkeys(_OUTSIDE, "outside of its pipeline_layers()"),
    **dict.fromkeys(("accumulation", "accumulation_layers", "freezes_in_accumulation"), "more micro_batches instead"),
    **dict.fromkeys(("unfreezes", "unfreezes_fit_twice", "unfreezes_in_step"), "would have no trainable parameter"),
    **dict.fromkeys(_COPIES, "copies or masks a whole module"),
    **dict.fromkeys(_FINETUNING, "unfreezes layers during the training"),
    **dict.fromkeys(("shared_layer", "shared_norm", "shared_parameter", "same_block"), "would each train a copy"),
    "adds_layer": "has adapter.bias, adapter.weight outside of its pipeline_layers()",
    **dict.fromkeys(("closure_of_many", "line_search"), "trains by LBFGS"),
    "own_optimizer_step": "optimizer_zero_grad(), which a pipeline never calls",
    "siamese": "a second time",
    "auxiliary_loss": "goes through self.parameters()",
    "sets_weights": "Unexpected key(s) in state_dict",
}
# Four stages of one layer each.
OF_FOUR: dict[str, dict[str, str]] = {"pipeline": {"adds_group": "configure_optimizers failed on a stage"}}
_OTHER_FORWARD = "pipeline_layers() say another forward pass than forward()"
# What means nothing under a strategy, or stops one rank alone, with the reason.
_GRADIENTS_ELSEWHERE = {"clamps_gradients": "DeepSpeed has the gradients: a warning names the function that edits them"}
_EXPERTS = dict.fromkeys(
    ("experts", "experts_by_hand", "experts_decay"),
    "ranks that use other layers in a step send other gradients, and end in the network's error, or wait",
)
LEFT_OUT: dict[str, dict[str, str]] = {
    **{layout: {**_GRADIENTS_ELSEWHERE, **_EXPERTS} for layout in ("zero_1", "zero_2", "zero_3")},
    "local_sgd": {
        "clipping": "has another meaning: each replica clips the gradients of its own samples",
        "experts_decay": "averages of what AdamW made of each replica's gradients are not what it makes of their mean",
    },
    "fsdp2": _EXPERTS,
    "tensor_parallel": {
        **dict.fromkeys(("momentum_teacher", "logs_norm"), "torch's error in the first step: see the note it gets"),
        **_EXPERTS,
    },
    "pipeline": {
        **dict.fromkeys(("weight_of_a_block", "part_of_a_block", "part_and_block", "skips_a_block"), _OTHER_FORWARD),
        "logs_norm": "a callback has the parameters of its stage alone",
    },
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
