"""What DeepSpeed needs on the machine, looked for before anything starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from azureml_strategy.strategies.errors import NoDeepSpeedError


def require_deepspeed() -> None:
    """Stop where DeepSpeed is not installed.

    Raises:
        NoDeepSpeedError: it is not.
    """
    if find_spec("deepspeed") is None:
        raise NoDeepSpeedError(
            "This strategy needs DeepSpeed, which is not installed here. Type: "
            "pip install 'azureml-strategy[deepspeed]'; or choose strategy='azureml_ddp', which needs nothing more."
        )


def require_compiler(config: Mapping[str, Any]) -> None:
    """Stop where DeepSpeed would compile an extension at its first use, and cannot.

    ZeRO itself is Python. Compiled are the optimizers that the configuration names, and the reader of NVMe disks.

    Args:
        config: DeepSpeed's configuration.

    Raises:
        RuntimeError: a compiler or ninja is missing; the message names what needs it.
    """
    compiled = [name for name, wanted in _compiled_parts(config).items() if wanted]
    compiler = os.environ.get("CXX", "c++")
    missing = [program for program in (compiler, "ninja") if shutil.which(program) is None]
    if compiled and missing:
        raise RuntimeError(
            f"DeepSpeed compiles {' and '.join(compiled)} at first use, but the PATH has no {' and no '.join(missing)}."
            " Type: apt-get install g++ ninja-build; or leave that part out of the configuration."
        )


def _compiled_parts(config: Mapping[str, Any]) -> dict[str, bool]:
    optimizer = config.get("optimizer")
    return {
        f"the optimizer {(optimizer or {}).get('type')!r} of its configuration": bool(optimizer),
        "the reader of NVMe disks": uses_nvme(config),
    }


def uses_nvme(config: Mapping[str, Any]) -> bool:
    """Whether parameters or optimizer states go to an NVMe disk."""
    zero = config.get("zero_optimization") or {}
    # DeepSpeed takes None and False for none
    return any((zero.get(part) or {}).get("device") == "nvme" for part in ("offload_param", "offload_optimizer"))
