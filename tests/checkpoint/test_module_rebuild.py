"""Modules made again from what their files tell, and what a file cannot make."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import timeit
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional

from azureml_strategy.checkpoint.formats import CheckpointFormatError
from azureml_strategy.checkpoint.module_rebuild import make_module, modules_of
from azureml_strategy.checkpoint.module_record import (
    CLASS,
    CONFIG,
    INPUT,
    MODULE,
    class_path,
    merged,
    module_entry,
    module_overrides,
    remember_config,
    remember_input,
)
from azureml_strategy.checkpoint.serialization import to_plain
from azureml_strategy.models import GPTConfig, ImageClassifier, LanguageModel, ResNet50

HERE = __name__


@dataclasses.dataclass
class Widths:
    widths: list[int]


class Own(LightningModule):
    def __init__(self, settings: Widths, bias: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=bias) for width in settings.widths))


class Needy(LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["network"])
        self.network = network


class Hooked(LightningModule):
    def configure_model(self) -> None:
        raise RuntimeError(f"needs\n{self.trainer}")


def told(module: LightningModule, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of a consolidated file."""
    if config is not None:
        remember_config(module, config)
    hparams = {"hyper_parameters": dict(module.hparams), "hparams_name": "kwargs"}
    return {"state_dict": module.state_dict(), **hparams, **module_entry(module)}


def test_by_its_saved_hyperparameters() -> None:
    module = Own(Widths([2, 3]), bias=False)
    made = make_module(told(module))
    assert isinstance(made, Own)
    assert made.layers[1].in_features == 3
    assert all(torch.equal(made.state_dict()[name], value) for name, value in module.state_dict().items())


def test_by_its_configuration_with_modules_data_classes_and_lists_in_it() -> None:
    network = {"_target_": "azureml_strategy.models.ResNet50", "num_classes": 3, "_convert_": "all"}
    config = {"_target_": "azureml_strategy.models.ImageClassifier", "network": network, "mean": [0.5, 0.5, 0.5]}
    module = ImageClassifier(ResNet50(3), mean=[0.5, 0.5, 0.5]).eval()
    made = make_module(told(module, config))
    images = torch.randint(0, 255, (2, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(made(images), module(images))


def test_a_gpt_whose_layers_configure_model_makes() -> None:
    sizes = {"vocab_size": 11, "context": 8, "layers": 1, "width": 8, "heads": 2, "mlp_width": 16}
    module = LanguageModel(GPTConfig(**sizes))
    module.configure_model()
    network = {"_target_": "azureml_strategy.models.GPTConfig", **sizes}
    made = make_module(told(module, {"_target_": "azureml_strategy.models.LanguageModel", "network": network}))
    tokens = torch.randint(0, 11, (2, 8))
    assert torch.equal(made(tokens), module.eval()(tokens))


def test_by_a_module_of_a_folder(tmp_path: Path) -> None:
    before = [*sys.path]
    text = "from lightning.pytorch import LightningModule\nclass Far(LightningModule):\n    pass\n"
    (tmp_path / "far_away.py").write_text(text)
    content = {"state_dict": {}, MODULE: {CLASS: "far_away.Far"}}
    with pytest.raises(CheckpointFormatError, match=r"far_away\.Far, which cannot be imported here\. Give .*--code"):
        make_module(content)
    with modules_of(tmp_path):
        assert sys.path == [*before, str(tmp_path)]
        assert type(make_module(content)).__name__ == "Far"
    assert sys.path == before, "a training in the same process would import far_away.py in place of its own"


def test_what_another_thread_adds_to_the_path_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = [*sys.path]
    with modules_of(tmp_path), ThreadPoolExecutor(1) as other:
        other.submit(sys.path.append, "of another thread").result()
    assert sys.path == [*before, "of another thread"]


@dataclasses.dataclass
class Held:
    what: Any


def shout(*_: Any) -> None:
    raise AssertionError("a function of the file was called")


class Calls(LightningModule):
    """A module that calls what it is given, as those of torch call their activation."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        while not callable(activation):
            activation = activation.what if isinstance(activation, Held) else next(iter(activation))
        activation(torch.zeros(1))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.get("extra", torch.relu)(torch.zeros(1))


@pytest.mark.parametrize(
    "activation",
    [
        *(functools.partial(shout, 1), shout, [shout], {"a": (shout,)}, collections.defaultdict(shout, a=shout)),
        *(Held(shout), Held([functools.partial(timeit.timeit, "pass", "raise AssertionError")])),
        *(timeit.timeit, torch.hub.load),
    ],
)
def test_a_function_of_a_file_is_not_called(activation: Any) -> None:
    content = {"state_dict": {}, "hyper_parameters": {"activation": activation}, MODULE: {CLASS: f"{HERE}.Calls"}}
    with pytest.raises(CheckpointFormatError, match=r"model\.activation holds .*--module-class"):
        make_module(to_plain(content))
    config = {"_target_": f"{HERE}.Calls", "activation": activation}
    with pytest.raises(CheckpointFormatError, match=r"model\.activation holds"):
        make_module(to_plain({"state_dict": {}, MODULE: {CONFIG: config}}))
    extra = {"state_dict": {}, "hyper_parameters": {"activation": functional.gelu}, "extra": activation}
    with pytest.raises(CheckpointFormatError, match="extra holds"):
        make_module(to_plain({**extra, MODULE: {CLASS: f"{HERE}.Calls"}}))


@pytest.mark.parametrize(
    "value",
    [
        *(functional.gelu, functional.softplus, nn.ReLU, Held(Path("a")), OmegaConf.create({"a": [1, {"b": None}]})),
        *(np.arange(3), np.float32(1), collections.OrderedDict(a={1, 2}), torch.float16, b"a", 10**30),
    ],
)
def test_values_classes_of_modules_and_torchs_functions_are_given(value: Any) -> None:
    content = {"state_dict": {}, "hyper_parameters": {"value": value}, MODULE: {CLASS: f"{HERE}.Takes"}}
    made = make_module(to_plain(content))
    assert isinstance(made, Takes)
    assert str(made.value) == str(value)


class Takes(LightningModule):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, r"does not tell the class of its module.*--module-class MODULE\.CLASS"),
        ({CLASS: "os.system"}, "os.system, which is no class of a module and no data class"),
        ({CLASS: "subprocess.Popen"}, "which is no class of a module"),
        ({CLASS: f"{HERE}.Absent"}, "cannot be imported here"),
        ({CLASS: "a.b.<locals>.Net"}, "It is defined inside of a function: move the class"),
        ({CLASS: "__main__.Net"}, "It was defined in a notebook: write the class to a file"),
        ({CLASS: f"{HERE}.Widths"}, r"needs widths, which the file does not tell\. Call self\.save_hyperparameters"),
        ({CLASS: f"{HERE}.Needy"}, "Needy needs network, which the file does not tell"),
        ({CLASS: f"{HERE}.Hooked"}, "its configure_model or on_load_checkpoint says RuntimeError: .*Trainer"),
        ({CONFIG: {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}}, "which is no LightningModule"),
        ({CONFIG: {"_target_": f"{HERE}.Needy", "network": {"_target_": "os.getcwd"}}}, "model.network is os.getcwd"),
        ({CONFIG: {"_target_": f"{HERE}.Own", "wrong": 1}}, "model cannot be made: Own says TypeError: .*wrong"),
        ({CONFIG: {"_target_": f"{HERE}.Own", "settings": "<redacted>"}}, r"model\.settings looked like a secret in"),
        ({CONFIG: {"_target_": f"{HERE}.Own", "settings": "${oc.env:X}"}}, r"model\.settings was \$\{oc\.env:X\} in"),
    ],
)
def test_what_a_file_cannot_make_is_one_sentence(record: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(CheckpointFormatError, match=words) as caught:
        make_module({"state_dict": {}, **({} if record is None else {MODULE: record})})
    assert "\n" not in str(caught.value)


def test_weights_of_another_class_or_size() -> None:
    content = told(Own(Widths([2])))
    lacking = {**content, "state_dict": {"layers.0.weight": torch.zeros(2, 2)}}
    with pytest.raises(CheckpointFormatError, match=r"The weights do not fit Own: the file lacks layers\.0\.bias\."):
        make_module(lacking)
    more = {**content["state_dict"], **{f"x{number}": torch.zeros(1) for number in range(5)}}
    with pytest.raises(CheckpointFormatError, match="has x0, x1, x2 and 2 more, which the class does not have"):
        make_module({**content, "state_dict": more})
    other = {"layers.0.weight": torch.zeros(3, 3), "layers.0.bias": torch.zeros(3)}
    with pytest.raises(CheckpointFormatError, match=r"do not fit Own: size mismatch for layers\.0\.weight"):
        make_module({**content, "state_dict": other})


def test_the_input_is_that_of_the_batches_and_what_varies_is_free() -> None:
    module = Own(Widths([2]))
    for batch in ((torch.zeros(4, 3, 8, 8), 1), [torch.zeros(2, 3, 8, 9)], torch.zeros(1, 3, 8, 7), {"a": 1}, [], None):
        remember_input(module, batch)
    assert module_entry(module)[MODULE][INPUT] == {"shape": [3, 8, None], "dtype": "float32"}
    remember_input(module, torch.zeros(4, 3, dtype=torch.uint8))
    assert module_entry(module)[MODULE][INPUT] == {"shape": [3], "dtype": "uint8"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_input_is_as_it_was_before_the_training_s_precision(dtype: torch.dtype) -> None:
    module = Own(Widths([2]))
    remember_input(module, torch.zeros(4, 3).to(dtype))
    assert module_entry(module)[MODULE][INPUT] == {"shape": [3], "dtype": "float32"}


def test_the_input_of_an_example_is_second_best() -> None:
    module = Own(Widths([2]))
    module.example_input_array = torch.zeros(1, 5)
    assert module_entry(module)[MODULE][INPUT]["shape"] == [5]
    assert module_entry(None) == {}


class FSDPOwn(Own):
    """As torch derives one in `fully_shard`."""

    __module__ = "torch.distributed.fsdp._fully_shard._fully_shard"


def test_a_class_is_named_as_another_process_imports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert class_path(Own) == f"{HERE}.Own"
    assert class_path(FSDPOwn) == f"{HERE}.Own"
    monkeypatch.setattr(Own, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/somewhere/train.py", raising=False)
    assert class_path(Own) == "train.Own"


def test_what_a_user_tells_replaces_what_is_recorded() -> None:
    recorded = {CLASS: "a.B", CONFIG: {"_target_": "a.B"}, INPUT: {"shape": [1], "dtype": "uint8"}}
    assert merged(recorded, module_overrides("c.D")) == {CLASS: "c.D", INPUT: recorded[INPUT]}
    assert merged(recorded, module_overrides(sizes=(3,)))[INPUT] == {"shape": [3], "dtype": "float32"}
    assert merged(None, module_overrides("c.D")) == {CLASS: "c.D"}
