"""What a strategy refuses before the first step, by situation, with words of its message."""

from __future__ import annotations

DDP: dict[str, str] = {}

LOCAL_SGD: dict[str, str] = {}

ZERO: dict[str, str] = {}

ZERO_3: dict[str, str] = {}

FSDP2: dict[str, str] = {}

TENSOR_PARALLEL: dict[str, str] = {}

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
