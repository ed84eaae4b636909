"""Checkpoints of values of all kinds, which a restart must be able to load."""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from tests.multiprocess.scripts.keeps import VALUES, fit, stop_and_go_on
from torch import Tensor, nn

from azureml_strategy.checkpoint.consolidate import consolidate
from azureml_strategy.checkpoint.serialization import (
    UnsavableStateError,
    from_plain,
    moved_hyperparameters,
    require_loadable,
    saved_hyperparameters,
    to_plain,
)


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # what seed_everything writes goes away again
        monkeypatch.setenv(name, "0")


@pytest.mark.parametrize("kind", VALUES)
def test_a_restart_gives_back_what_was_kept(kind: str, tmp_path: Path) -> None:
    assert stop_and_go_on(tmp_path, VALUES[kind], lambda: "auto")["wrong"] == []


def test_learning_rates_that_numpy_computed(tmp_path: Path) -> None:
    values = VALUES["numpy scalar"]
    whole, again = fit(tmp_path / "whole", values, "auto"), stop_and_go_on(tmp_path, values, lambda: "auto")
    assert (again["weights"], again["rates"]) == (whole["weights"], whole["rates"])


class Configured(LightningModule):
    """Its arguments are its hyperparameters."""

    def __init__(self, width: int, root: Any, more: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)


def dumped(module: LightningModule) -> dict[str, Any]:
    """What Lightning has the strategy write."""
    trainer = Trainer(accelerator="cpu", logger=False, barebones=True)
    trainer.strategy.connect(module)
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=True)


def written(checkpoint: dict[str, Any], folder: Path) -> Path:
    require_loadable(to_plain(checkpoint))
    torch.save(to_plain(checkpoint), folder / "plain.ckpt")
    return folder / "plain.ckpt"


def _with_attribute(tensor: Tensor, value: Any) -> Tensor:
    tensor.note = value  # type: ignore[attr-defined]
    return tensor


_TENSORS = {
    **{
        str(dtype): torch.zeros(3, dtype=dtype)
        for dtype in sorted(torch.storage._dtype_to_storage_type_map(), key=str)
        if not str(dtype).startswith("torch.q")
    },
    "parameter": nn.Parameter(torch.ones(2)),
    "frozen parameter": nn.Parameter(torch.ones(2), requires_grad=False),
    "no elements": torch.empty(0, 3),
    "expanded": torch.ones(1).expand(4),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "meta": torch.empty(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "compressed rows": torch.eye(2).to_sparse_csr(),
    "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "buffer": nn.Buffer(torch.ones(2)),
    "with a number": _with_attribute(torch.ones(2), 1),
    "with a path": _with_attribute(torch.ones(2), Path("a")),
    "parameter with a path": _with_attribute(nn.Parameter(torch.ones(2)), Path("a")),
}


@pytest.mark.parametrize("kind", _TENSORS)
def test_what_is_found_loadable_is_what_torch_loads(kind: str, tmp_path: Path) -> None:
    content = {"state_dict": OrderedDict(weight=_TENSORS[kind]), "again": [_TENSORS[kind]]}
    torch.save(content, tmp_path / "whole.pt")
    try:
        torch.load(tmp_path / "whole.pt", weights_only=True)
    except pickle.UnpicklingError:  # nested ones too, from torch 2.15 on
        assert kind == "nested" or kind.endswith("with a path")
        with pytest.raises(ValueError, match="a restart could not load it: "):
            require_loadable(content)
    else:
        require_loadable(content)


def test_what_is_beside_dense_tensors_is_loaded_back() -> None:
    cyclic: dict[str, Any] = {"weight": torch.ones(2)}
    cyclic["itself"] = cyclic
    require_loadable(cyclic)
    with pytest.raises(ValueError, match=r"it holds .*PosixPath.*add_safe_globals"):
        require_loadable({"state_dict": {"weight": torch.ones(2)}, "deep": [{"in it": (Path("a"),)}]})


@pytest.mark.parametrize(
    "entry",
    [
        {Path("a"): 1, "b": 2},
        {"a": {Path("b"): 1}},
        [1, Path("a"), {Path("b"): 1}],
        [[1, 2], [Path("a")]],
        (1, Path("a")),
        Path("a"),
        {1: {"a": Path("a")}, "1": 2},
    ],
)
def test_an_entry_of_any_shape(entry: Any, tmp_path: Path) -> None:
    checkpoint = {"state_dict": {"weight": torch.ones(2)}, "mine": entry}
    read = torch.load(written(checkpoint, tmp_path), weights_only=True)
    assert from_plain(read)["mine"] == entry


def test_what_others_read_is_whole_or_not_there(tmp_path: Path) -> None:
    file = written(dumped(Configured(3, Path("/data"), {"a": [1, {"b": Path("c")}]})), tmp_path)
    assert torch.load(file, weights_only=True)["hyper_parameters"] == {"width": 3}
    assert moved_hyperparameters(file) == ["root", "more"]
    with pytest.raises(TypeError, match="root"):
        Configured.load_from_checkpoint(file)
    module = Configured.load_from_checkpoint(file, **saved_hyperparameters(file))
    assert dict(module.hparams) == {"width": 3, "root": Path("/data"), "more": {"a": [1, {"b": Path("c")}]}}


def test_hyperparameters_of_a_checkpoint_that_stock_lightning_wrote(tmp_path: Path) -> None:
    torch.save(dumped(Configured(3, Path("/data"), Namespace(a=Path("b")))), tmp_path / "stock.ckpt")
    consolidate(tmp_path / "stock.ckpt", tmp_path / "weights.ckpt", trust_pickles=True)
    assert saved_hyperparameters(tmp_path / "weights.ckpt") == {
        "width": 3,
        "root": Path("/data"),
        "more": Namespace(a=Path("b")),
    }


def test_a_hyperparameter_without_a_plain_form_costs_a_warning(tmp_path: Path) -> None:
    checkpoint = dumped(Configured(3, Path("/data"), {"activation": nn.ReLU()}))
    with pytest.warns(UserWarning, match=r"hyperparameter more is not in the checkpoints.*ReLU.*\['more'\]"):
        file = written(checkpoint, tmp_path)
    assert saved_hyperparameters(file) == {"width": 3, "root": Path("/data")}


def test_state_without_a_plain_form_ends_the_training() -> None:
    with pytest.raises(UnsavableStateError, match=r"callbacks → mine → activation is a .*ReLU"):
        to_plain({"state_dict": {}, "callbacks": {"mine": {"activation": nn.ReLU()}}})
