"""What a strategy of Fabric's ends by loop, with words of its message: before the first step, or before a wrong one."""

from __future__ import annotations

_LINE_SEARCH = ("lbfgs", "line_search")
_MIXED = "got mixed torch.Tensor and DTensor"
FSDP2: dict[str, str] = {
    "own_backward": "call `fabric.backward(loss)`",
    "scalar_parameter": "nn.Parameter(torch.ones(1))",
    "average_made_before": _MIXED,
    **dict.fromkeys(("average_made_after", "average_of_the_wrapper"), "Copy it before, and shard the copy alike"),
    **dict.fromkeys(_LINE_SEARCH, "LBFGS makes one vector"),
}
_CHANGED = "after the start, but DeepSpeed goes on"
_THROUGH = "A backward pass of another module goes through"
ZERO: dict[str, str] = {
    "apart": "requires",
    "two_optimizers": "only one optimizer is supported with DeepSpeed",
    "optimizer_of_its_own": "set up jointly",
    **dict.fromkeys(("unfreezes", "freezes"), _CHANGED),
    **dict.fromkeys(("adversaries", "adversaries_without_toggles", "adversaries_of_one_pass"), _THROUGH),
    **dict.fromkeys(("adds_layer", "adds_adapter"), "A parameter group was added"),
    "own_backward": "call `fabric.backward(loss)`",
    "scalar_parameter": "nn.Parameter(torch.ones(1))",
    "setup_twice": "please provide the model",
    "average_of_the_wrapper": "cannot pickle",
    "average_set_up": "requires an optimizer",
    **dict.fromkeys(_LINE_SEARCH, "trains by LBFGS"),
    **dict.fromkeys(("clips_norm", "clips_largest", "clips_value", "clips_with_skips"), "`gradient_clipping`"),
}
ZERO_3: dict[str, str] = {
    **ZERO,
    "average_made_after": "The size of tensor a (0) must match",
    "average_set_up": "please provide the model",
}
REFUSED: dict[str, dict[str, str]] = {
    "fsdp2": FSDP2,
    "tensor_parallel": FSDP2,
    **dict.fromkeys(("zero_1", "zero_2"), ZERO),
    "zero_3": ZERO_3,
}
_LATER_OF_ZERO = ("unfreezes", "freezes", "adversaries_of_one_pass", "adds_layer", "adds_adapter", "setup_twice")
# An average's is torch's own error, after a step that is right. ZeRO's are refused before a wrong one.
ENDS_LATER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("fsdp2", "tensor_parallel"), ("average_made_before",)),
    **dict.fromkeys(("zero_1", "zero_2"), _LATER_OF_ZERO),
    "zero_3": (*_LATER_OF_ZERO, "average_made_after"),
}
# Ranks that use other layers in a step send other gradients, and end in the network's error, or wait.
LEFT_OUT: dict[str, tuple[str, ...]] = dict.fromkeys(
    ("fsdp2", "tensor_parallel", "zero_1", "zero_2", "zero_3"), ("experts",)
)
