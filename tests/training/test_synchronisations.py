"""No step of a recipe makes the host wait for the device, but for those that log; see `tests.synchronisations`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.synchronisations import DEVICE, DeviceTensors, _Calls, _Operations
from tests.tiny_model import save_tiny_model
from tests.training.conftest import COMMAND, run
from torch import Tensor

_TINY = ("layers=1", "width=32", "heads=2", "mlp_width=48", "context=32")
TEXT = [
    *(f"model.network.{each}" for each in _TINY),
    *("model.warmup_steps=2", "data.batch_size=4", "data.cache=cache"),
    *("trainer.max_steps=12", "trainer.val_check_interval=6", "trainer.limit_val_batches=3"),
]
IMAGES = [
    *("data.image_size=32", "data.batch_size=4", "model.warmup_epochs=0", "trainer.max_epochs=1"),
    *("trainer.limit_train_batches=12", "trainer.limit_val_batches=3"),
]
LOCAL = ["strategy.warmup_steps=2", "strategy.period=4"]
# By recipe, with what else tells it: further overrides.
CASES: dict[str, list[str]] = {
    "resnet50_synthetic": [*IMAGES, "data.steps_per_epoch=12"],
    "resnet50_ddp": IMAGES,
    "resnet50_local_sgd": [*IMAGES, *LOCAL],
    "resnet50_pipeline": [*IMAGES, "data.batch_size=8", "strategy.num_stages=${trainer.devices}"],
    "gpt_ddp": TEXT,
    "gpt_ddp trainer.accumulate_grad_batches=2": [*TEXT, "trainer.val_check_interval=12"],
    "gpt_ddp trainer.precision=bf16-mixed": TEXT,
    "gpt_ddp strategy=lightning_ddp": TEXT,
    "gpt_ddp strategy=deepspeed_stage_1": TEXT,
    "gpt_ddp strategy=deepspeed_stage_2": TEXT,
    "gpt_ddp strategy=deepspeed_stage_3_offload": TEXT,
    "gpt_ddp strategy=local_sgd": [*TEXT, *LOCAL],
    "gpt_zero3": TEXT,
    "gpt_tensor_parallel": TEXT,
    "gpt_pipeline": [*TEXT, "strategy.num_stages=${trainer.devices}"],
    "gpt_diloco": [*TEXT, *LOCAL],
    "finetune_lm": [
        *(
            "model.path=tiny",
            "model.warmup_steps=2",
            "data.batch_size=2",
            "data.sequence_length=32",
            "data.cache=cache",
        ),
        *("trainer.limit_train_batches=12", "trainer.limit_val_batches=3", "model.lora_rank=4"),
    ],
}
# DeepSpeed's optimizer asks on the host whether a norm is finite, and skips the step if not; stages but the last copy
# zeros for the loss that they receive: docs/upstream.md.
# Parameters that are offloaded come from the host. ZeRO-3 compares the order of a step's layers over the ranks.
# transformers asks whether positions start again within a row.
OF_OTHERS = {
    *("assert_lst_len_same_as_other_ranks", "get_lst_from_rank0"),
    *("_aggregate_total_loss", "find_packed_sequence_indices", "_allgather_params_coalesced"),
    *("has_overflow", "is_invalid_grad_norm", "mask_nan_or_inf_with_val_inplace", "get_grad_norm_direct"),
    *("clip_tensors_by_global_norm", "complete_grad_norm_calculation_for_cpu_offload"),
}


def watched(recipe: str, overrides: list[str], ranks: int) -> list[dict[str, Any]]:
    """What `tests.synchronisations` has found on each rank."""
    if recipe == "finetune_lm":
        save_tiny_model(Path("tiny"))
    watch = f"callbacks={{watch:{{_target_:tests.synchronisations.Watch,path:{Path('found.json').absolute()}}}}}"
    quiet = ("tracking=console", "tracking.page=null", "trainer.log_every_n_steps=50", "trainer=cpu")
    run(COMMAND, "train", *recipe.split(), *quiet, f"trainer.devices={ranks}", *overrides, watch)
    return [json.loads(Path(f"found.{rank}.json").read_text()) for rank in range(ranks)]


def judge(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert each["steps"] >= 8
        others = [words for words in each["found"] if not any(f" in {name}" in words for name in OF_OTHERS)]
        assert not others, "\n".join(others)


def test_no_step_of_the_gpt_waits() -> None:
    """Its validation steps once counted their tokens on the host."""
    judge(watched("gpt_ddp", TEXT, 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("recipe", CASES)
def test_no_step_of_a_recipe_waits(recipe: str, ranks: int) -> None:
    judge(watched(recipe, CASES[recipe], ranks))


def _masked(tensor: Tensor, value: Any) -> None:
    tensor[tensor > 0] = value


# What an expression of a device's tensor `x` of three numbers is found to be; None if nothing waits for it.
EXPRESSIONS: dict[str, tuple[Callable[[Tensor], Any], str | None]] = {
    "item": (lambda x: x[0].item(), "aten::_local_scalar_dense"),
    "float": (lambda x: float(x.sum()), "aten::_local_scalar_dense"),
    "condition": (lambda x: 1 if x.isfinite().all() else 0, "aten::_local_scalar_dense"),
    "text": (lambda x: f"{x[0]:.3f}", "aten::_local_scalar_dense"),
    "repr": (repr, "__repr__"),
    "list": (lambda x: x.tolist(), "tolist"),
    "numpy": (lambda x: x.numpy(), "numpy"),
    "cpu": (lambda x: x.cpu(), "to the host"),
    "cpu without waiting": (lambda x: x.to("cpu", non_blocking=True), None),
    "to the device": (lambda x: torch.zeros(3).to(DEVICE), "to the device"),
    "to the device of a tensor": (lambda x: torch.zeros(3).to(x.device), "to the device"),
    "to the device without waiting": (lambda x: torch.zeros(3).to(x.device, non_blocking=True) + x, None),
    "number": (lambda x: torch.tensor(1.0, device=x.device), "tensor"),
    "as_tensor": (lambda x: torch.as_tensor([1.0], device=DEVICE), "as_tensor"),
    "new_tensor": (lambda x: x.new_tensor(1.0), "new_tensor"),
    "filled": (lambda x: torch.full((), 1.0, device=x.device) + x, None),
    "number of the host": (lambda x: torch.tensor(1.0).item(), None),
    "copy": (lambda x: torch.zeros(3).copy_(x), "aten::copy_"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "mask": (lambda x: x[x > 0], "aten::index"),
    "masked by numbers": (lambda x: _masked(x.clone(), torch.ones(2)), "aten::index_put_"),
    "masked by a number": (lambda x: _masked(x.clone(), 1.0), None),
    "unique": (lambda x: x.unique(), "aten::_unique2"),
    "repeat": (
        lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64).to(DEVICE, non_blocking=True)),
        "aten::repeat_interleave",
    ),
    "equal": (lambda x: torch.equal(x, x), "aten::equal"),
    "gradient": (lambda x: (x.clone().requires_grad_() * 2).sum().backward(), None),
    "norm": (lambda x: torch.nn.utils.get_total_norm([x, x]), None),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_what_waits_is_found(name: str) -> None:
    expression, expected = EXPRESSIONS[name]
    tensors, found = DeviceTensors(), list[str]()
    x = torch.arange(3.0)
    tensors.add(x)
    with _Operations(tensors, found.append), _Calls(tensors, found.append):
        expression(x)
    assert found[:1] == ([] if expected is None else [expected])
