"""torch's flight recorder: switched on before the process group starts, so that a hang can be explained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from azureml_strategy.network.settings import Setting

# Some hundred bytes each, and torch's own default where it has one: a step of a large model has some hundreds.
_ENTRIES = 2000
_SOURCE = "PyTorch, ProcessGroupNCCL environment variables"


def recorder_settings(configured: Mapping[str, tuple[str, str]], folder: Path | None) -> Iterator[Setting]:
    """Have torch remember the last collectives, and NCCL's watchdog write them down when one times out.

    Older releases of torch record nothing unless they are told, and only for NCCL; newer ones have other names, and
    warn of the old ones.

    Args:
        configured: value and source of each variable that is set already.
        folder: for what the watchdog writes; None leaves it where torch puts it, in the node's /tmp.
    """
    from torch._C import _distributed_c10d

    new = hasattr(_distributed_c10d, "_dump_fr_trace")
    size, file = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
    old_size, old_file = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    if size not in configured and old_size not in configured:
        reason = f"torch remembers the last {_ENTRIES} collectives, by which a rank that hangs is found."
        yield Setting(size if new else old_size, str(_ENTRIES), reason, _SOURCE)
    if folder is None:
        return
    if "TORCH_NCCL_DUMP_ON_TIMEOUT" not in configured:
        reason = "NCCL's watchdog writes them down before it ends the process."
        yield Setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", reason, _SOURCE)
    if file not in configured and old_file not in configured:
        reason = "They must not go with the node, as /tmp does."
        yield Setting(file if new else old_file, str(folder / "flight_recorder.rank_"), reason, _SOURCE)
