"""Describes a network for the planner: from a module, by a well-known name, or from counts of parameters and FLOPs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from azureml_strategy.models import Bottleneck, GPTConfig, LanguageModel, ResNet50
from azureml_strategy.planning.errors import PlanError
from azureml_strategy.planning.operators import Gradient, Operator, Operators, list_operators, on_meta

Family = Literal["convolutional", "transformer"]
# He et al. 2015, table 1 (https://arxiv.org/abs/1512.03385): blocks of the third stage; the second has 8 in ResNet-152.
_RESNETS = {"resnet50": (4, 6), "resnet101": (4, 23), "resnet152": (8, 36)}
# Dosovitskiy et al. 2020, table 1 (https://arxiv.org/abs/2010.11929): layers, width, heads.
_TRANSFORMERS = {"vit_b_16": (12, 768, 12), "vit_l_16": (24, 1024, 16)}
# Brown et al. 2020, table 2.1 (https://arxiv.org/abs/2005.14165): layers, width, heads.
_GPTS = {
    "gpt_125m": (12, 768, 12),
    "gpt_350m": (24, 1024, 16),
    "gpt_1b": (24, 2048, 16),
    "gpt_3b": (32, 2560, 32),
    "gpt_7b": (32, 4096, 32),
    "gpt_13b": (40, 5120, 40),
}
_VOCABULARY, _CONTEXT = 50304, 1024  # GPT-2's, padded to a multiple of 64
_SAMPLES = 8  # of the batch with which a named network is traced; all counts are scaled from it


@dataclass(frozen=True, eq=False)
class Network:
    """What a network computes in a step.

    Attributes:
        name: for messages.
        operators: those of a batch of `operators.samples`.
        family: whose efficiency on a GPU is taken where nothing was measured.
        tokens: tokens of a sample; 0 where a sample is none of tokens.
        width: elements that a block of a transformer passes on for each token; 0 if it is not known.
        blocks: number of blocks; 0 if it is not known.
    """

    name: str
    operators: Operators
    family: Family
    tokens: int = 0
    width: int = 0
    blocks: int = 0

    @property
    def parameters(self) -> int:
        """Elements that are trained."""
        return self.operators.parameters

    @property
    def flops(self) -> float:
        """Operations of a forward and backward pass for one sample; a multiplication and an addition are two."""
        return self.operators.flops / self.operators.samples

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The parts whose parameters are gathered and sent one after the other, in the order of the forward pass."""
        return _units(self.operators)


@dataclass(frozen=True)
class Unit:
    """Parameters that belong together, as those of a block.

    Attributes:
        name: the part of the parameters' names that they share.
        elements: of its parameters.
        trained: of those that are trained.
        first: the first operator of the forward pass that needs them.
        done: the operator of the backward pass after which all their gradients are complete, and which is the last that
            needs them; -1 if the backward pass needs none of them.
    """

    name: str
    elements: int
    trained: int
    first: int
    done: int


_NUMBERED = re.compile(r"^(.*?\.)?\d+(?=\.)")


def unit_name(parameter: str) -> str:
    """The block that a parameter's name says it belongs to: all up to the first number, such as `layers.3`."""
    found = _NUMBERED.match(parameter)
    return found[0] if found else ""


def _units(operators: Operators) -> tuple[Unit, ...]:
    found: dict[str, Unit] = {}
    for each in operators.gradients:
        _put(found, each.name, each.elements, each.elements, operators.forward_of.get(each.name, 0), each.after)
    for frozen in operators.frozen:
        done = frozen.last if frozen.last >= operators.backward_from else -1
        _put(found, frozen.name, frozen.elements, 0, frozen.first, done)
    return tuple(sorted(found.values(), key=lambda unit: unit.first))


def _put(found: dict[str, Unit], parameter: str, elements: int, trained: int, first: int, done: int) -> None:
    """Put a parameter into its unit."""
    name = unit_name(parameter)
    one = found.get(name, Unit(name, 0, 0, first, done))
    found[name] = Unit(name, one.elements + elements, one.trained + trained, min(one.first, first), max(one.done, done))


def network_of_module(
    module: nn.Module, batch: Any, samples: int, name: str = "", family: Family | None = None
) -> Network:
    """Describe a module by running one of its steps on the meta device, where nothing is computed.

    Args:
        module: a LightningModule, whose `training_step` gives the loss, or any other, whose outputs' sum stands for
            it. All its tensors must be on the meta device: build it below `with torch.device("meta")`.
        batch: what the step gets, with the shapes of a real batch: a tuple as arguments and a dictionary as keywords of
            a module that is no LightningModule.
        samples: size of that batch.
        name: for messages; by default the name of the class.
        family: by default `convolutional` if most of its operations are convolutions, else `transformer`.

    Raises:
        PlanError: a tensor has numbers, or the step cannot be run without them.
    """
    real = next((key for key, each in module.state_dict(keep_vars=True).items() if not each.is_meta), None)
    if real is not None:
        raise PlanError(f"{real} is not on the meta device. Build the module below `with torch.device('meta'):`.")
    name = name or type(module).__name__
    if not any(each.requires_grad for each in module.parameters()):
        raise PlanError(f"{name} has no parameter that trains, so there is no training to plan.")
    if any(isinstance(each, (nn.Embedding, nn.EmbeddingBag)) and each.sparse for each in module.modules()):
        raise PlanError(
            f"{name} has sparse gradients, whose size depends on the batch's numbers. Build its embeddings with "
            "sparse=False for the plan."
        )
    inputs = on_meta(batch)
    step = _training_step(inputs) if isinstance(module, LightningModule) else _call(inputs)
    try:
        operators = list_operators(module, step, samples)
    except Exception as error:  # a user's forward pass may fail in any way on tensors without numbers
        raise PlanError(
            f"{name} cannot be tried on tensors without numbers ({type(error).__name__}: {error}). Give its counts "
            "instead: network_of_counts(parameters=..., flops=...)."
        ) from error
    return Network(name, operators, family or _family(operators), *_transformer_shape(module, inputs))


def _training_step(batch: Any) -> Callable[[nn.Module], Any]:
    def step(module: nn.Module) -> Any:
        with warnings.catch_warnings():
            # Without a Trainer `self.log` does nothing, and says so.
            warnings.filterwarnings("ignore", message=r"You are trying to `self\.log\(\)`")
            found = module.training_step(batch, 0)  # type: ignore[operator]
        return found["loss"] if isinstance(found, dict) else found

    return step


def _call(inputs: Any) -> Callable[[nn.Module], Any]:
    if isinstance(inputs, Mapping):
        return lambda module: module(**inputs)
    return lambda module: module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def _family(operators: Operators) -> Family:
    convolved = sum(each.flops for each in operators.listed if each.kind == "convolution")
    return "convolutional" if convolved > operators.flops / 2 else "transformer"


def _transformer_shape(module: nn.Module, inputs: Any) -> tuple[int, int, int]:
    if not isinstance(module, LanguageModel):
        return 0, 0, 0
    return int(inputs[0].shape[1]), module.network.width, module.network.layers


@lru_cache(maxsize=32)
def named_network(name: str, samples: int = _SAMPLES) -> Network:
    """Describe a well-known network: `resnet50`, `resnet101`, `resnet152` (224 pixels, 1,000 classes), `vit_b_16`,
    `vit_l_16` (the same images), or `gpt_125m` to `gpt_13b` (1,024 tokens, GPT-3's shapes).

    Args:
        name: in any case; hyphens count as underscores.
        samples: size of the batch for which it counts.

    Raises:
        PlanError: there is no such name.
    """
    key = name.lower().replace("-", "_")
    with torch.device("meta"):
        images, classes = torch.empty(samples, 3, 224, 224), torch.zeros(samples, dtype=torch.long)
        if key in _RESNETS:
            return _classifier(key, _resnet(*_RESNETS[key]), images, classes)
        if key in _TRANSFORMERS:
            return _classifier(key, _VisionTransformer(*_TRANSFORMERS[key]), images, classes)
        if key in _GPTS:
            return _gpt(key, *_GPTS[key], samples)
    known = ", ".join([*_RESNETS, *_TRANSFORMERS, *_GPTS])
    raise PlanError(f"No network is known as {name!r}. Known: {known}. Others: network_of_module or network_of_counts.")


def _classifier(name: str, module: nn.Module, images: Tensor, classes: Tensor) -> Network:
    operators = list_operators(module, lambda each: functional.cross_entropy(each(images), classes), len(images))
    return Network(name, operators, _family(operators))


def _resnet(second: int, third: int) -> nn.Module:
    network = ResNet50()
    network.layer2 = nn.Sequential(Bottleneck(256, 128, 2), *(Bottleneck(512, 128, 1) for _ in range(second - 1)))
    network.layer3 = nn.Sequential(Bottleneck(512, 256, 2), *(Bottleneck(1024, 256, 1) for _ in range(third - 1)))
    return network


class _VisionTransformer(nn.Module):
    """Patches of 16 pixels and a class token through an encoder, for 224 pixels and 1,000 classes."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 197, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `(N, 3, 224, 224)` to logits `(N, 1000)`."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden)[:, 0])  # type: ignore[no-any-return]


def _gpt(name: str, layers: int, width: int, heads: int, samples: int) -> Network:
    shape = (_VOCABULARY, _CONTEXT, layers, width, heads, 4 * width)
    module = LanguageModel(GPTConfig(*shape, norm="layernorm", positions="learned", mlp="gelu", tied=True, bias=True))
    module.configure_model()
    tokens = torch.zeros(samples, _CONTEXT, dtype=torch.long)
    operators = list_operators(module, lambda each: each(tokens, tokens), samples)
    return Network(name, operators, "transformer", _CONTEXT, width, layers)


def network_of_counts(
    parameters: float,
    flops: float,
    family: Family = "convolutional",
    name: str = "network",
    activations: float | None = None,
) -> Network:
    """Describe a network of which only counts are known: ResNet-50 or GPT-125M with its operators scaled to them.

    Args:
        parameters: elements that are trained.
        flops: operations of a forward and backward pass for one sample, where a multiplication and an addition are two:
            three times those of the forward pass, or six times its multiply-accumulates.
        family: `convolutional` scales ResNet-50, `transformer` scales GPT-125M.
        name: for messages.
        activations: elements of activations and gradients that a step reads and writes for one sample, one operator
            after the other. By default they are in the same proportion to the operations as in the scaled network.

    Raises:
        PlanError: a count is not positive.
    """
    if parameters <= 0 or flops <= 0:
        raise PlanError(f"A network of {parameters:g} parameters and {flops:g} operations computes nothing.")
    like = named_network("resnet50" if family == "convolutional" else "gpt_125m")
    work = flops / like.flops
    own = sum(each.reads + each.writes for each in like.operators.listed) / like.operators.samples
    moved = work if activations is None else activations / own
    size = parameters / like.parameters
    operators = replace(
        like.operators,
        listed=tuple(_scaled(each, work, moved, size) for each in like.operators.listed),
        gradients=tuple(
            Gradient(each.name, max(round(each.elements * size), 1), each.after) for each in like.operators.gradients
        ),
    )
    return replace(like, name=name, operators=operators)


def _scaled(operator: Operator, work: float, moved: float, size: float) -> Operator:
    return replace(
        operator,
        flops=operator.flops * work,
        reads=operator.reads * moved,
        writes=operator.writes * moved,
        weights=operator.weights * size,
        sizes=tuple(round(each * moved) for each in operator.sizes),
    )
