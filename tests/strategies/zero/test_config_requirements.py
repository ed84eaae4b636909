from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from azureml_strategy.strategies.errors import NoDeepSpeedError
from azureml_strategy.strategies.zero.config import require_compiler, require_deepspeed, uses_nvme

NVME = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}


def test_deepspeed_is_asked_for_by_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    require_deepspeed()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr("sys.path_importer_cache", {})
    monkeypatch.delitem(__import__("sys").modules, "deepspeed", raising=False)
    with pytest.raises(MisconfigurationException, match=r"pip install .*\[deepspeed\]'"):
        require_deepspeed()
    assert issubclass(NoDeepSpeedError, ModuleNotFoundError)


@pytest.mark.parametrize(("config", "words"), [(ADAM, "the optimizer 'Adam'"), (NVME, "the reader of NVMe disks")])
def test_what_is_compiled_needs_a_compiler(config: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "my-compiler")
    with pytest.raises(RuntimeError, match=f"{words}.*the PATH has no my-compiler and no ninja"):
        require_compiler(config)


def test_zero_itself_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    require_compiler({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})


@pytest.mark.parametrize("config", [ADAM, NVME])
def test_a_compiler_is_enough(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for program in ("c++", "ninja"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    require_compiler(config)


@pytest.mark.parametrize("zero", [None, {}, {"offload_optimizer": None}, {"offload_param": False}])
def test_what_deepspeed_takes_for_no_offload_needs_nothing(zero: dict[str, object] | None) -> None:
    assert not uses_nvme({"zero_optimization": zero})
