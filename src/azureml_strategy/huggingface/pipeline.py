"""A transformers model as a chain of layers that a pipeline cuts: embedding, blocks, norm, head.

The layers are the module's own, under their own names. A stage runs views of them: the same parameters with another
forward, which runs the model's own forward with that layer alone (`PartRunner`). The head runs in the user's step on
the last stage, where the model's base returns what came out of the pipeline.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from typing_extensions import override

from azureml_strategy.huggingface.model_parts import PartRunner
from azureml_strategy.huggingface.transformers_internals import (
    body,
    checkpoints_activations,
    find_models,
    pipeline_plan,
    recorded_outputs,
    tied_weights,
)
from azureml_strategy.interfaces import ChainLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What goes through the stages: the first becomes hidden states in the embedding, the others go along unchanged.
INPUTS = ("input_ids", "attention_mask", "position_ids")
# What a model with a head hands to its base and the base makes no use of: switches, and arguments of the loss.
_WITHOUT_EFFECT = ("use_cache", "return_dict", "num_items_in_batch", "shift_labels", "ignore_index")
_ELSEWHERE = "azureml_model_parallel and azureml_deepspeed_stage_3 train it without stages."

# Whether a layer has weights, in this process or on another stage.
HasWeights = Callable[[nn.Module], bool]


class UnfitModelError(MisconfigurationException, ValueError):
    """A transformers model, or a step that uses it, does not fit the pipeline. The message says what to change."""


class ModelChain:
    """The chain of the one transformers model in a module.

    Args:
        module: a LightningModule. What it has beside the model, such as a head of its own, goes to the last stage.
        has_weights: tells layers from modules that every stage keeps.
        recomputing: whether the strategy recomputes activations in the backward pass.

    Attributes:
        layers: the chain, of layers of the kinds `embedding`, `block`, `norm` and `head`. The layers exist already:
            `build` is called only if one has no values, and raises.
        heads: how many of the last layers stay together, on the last stage, because the user's step runs them.

    Raises:
        UnfitModelError: the module holds no model that can be cut.
    """

    def __init__(self, module: nn.Module, has_weights: HasWeights, recomputing: bool = False) -> None:
        name, model = _only_model(module, recomputing)
        self._module, self._model = module, model
        self._base = body(model)
        self._runner = _part_runner(self._base, has_weights)
        self._given: tuple[str, ...] = INPUTS[:1]
        base = next(each for each, layer in module.named_modules() if layer is self._base)
        self._parts = {f"{base}.{part}": part for part in self._runner.parts}
        heads = [each for each, layer in _beside(module, base) if has_weights(layer)]
        kinds = {
            **{each: self._runner.parts[part] for each, part in self._parts.items()},
            **dict.fromkeys(heads, "head"),
        }
        ties = _ties({f"{name}.{one}": f"{name}.{other}" for one, other in tied_weights(model).items()}, kinds)
        self.heads = max(1, len(heads))
        self.layers = [
            ChainLayer(partial(self._build, each), each, kind, *ties.get(each, (None, "")))
            for each, kind in kinds.items()
        ]
        self._refuse_shared()

    def _refuse_shared(self) -> None:
        """Refuse parameters that several layers share and the model does not call tied."""
        owners: dict[nn.Parameter, str] = {}
        for layer in self.layers:
            for name, parameter in self._module.get_submodule(layer.name).named_parameters():
                if name == layer.tied_parameter:
                    continue
                if owners.setdefault(parameter, layer.name) != layer.name:
                    raise UnfitModelError(
                        f"{owners[parameter]} and {layer.name} share {name}, and on two stages it would become two. "
                        f"{_ELSEWHERE}"
                    )

    def check(self) -> None:
        """Refuse a model that does more between its layers than passing on hidden states. Its blocks must be here.

        Raises:
            UnfitModelError: it does.
        """
        reason = (
            f"{type(self._base).__name__} does more between its layers than handing on hidden states, an attention "
            f"mask and positions, so it cannot be cut into stages. {_ELSEWHERE}"
        )
        try:
            fits = self._runner.check()
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UnfitModelError(reason) from error
        if not fits:
            raise UnfitModelError(reason)

    def split(self, batch: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the part of a batch that goes through the stages, and the whole batch, which all stages read alike.

        Raises:
            UnfitModelError: the batch is no mapping with `input_ids`.
        """
        if not isinstance(batch, Mapping) or INPUTS[0] not in batch:
            raise UnfitModelError(
                f"A batch of type {type(batch).__name__} does not say what {type(self._model).__name__} takes of it. "
                "Let the collate function return a mapping with 'input_ids', as tokenizers do; or give the module a "
                "method pipeline_batch(batch) that returns {'input_ids': ..., 'attention_mask': ...} and the targets."
            )
        return {name: batch[name] for name in INPUTS if batch.get(name) is not None}, dict(batch)

    def pack(self, inputs: Any) -> tuple[Tensor, ...]:
        """Return the inputs of the first stage, and remember which they are: all stages read the same batches.

        Raises:
            UnfitModelError: they are not tensors `(samples, tokens)` by their names in `INPUTS`.
        """
        given = dict(inputs) if isinstance(inputs, Mapping) else {}
        fits = INPUTS[0] in given and not given.keys() - set(INPUTS)
        if not fits or any(each.ndim != 2 for each in given.values()):
            shapes = {name: tuple(each.shape) for name, each in given.items()} or type(inputs).__name__
            raise UnfitModelError(
                f"The batch has {shapes} for {type(self._model).__name__}, but through the stages go only "
                f"{', '.join(INPUTS)}, each of shape (samples, tokens), in a dictionary by these names."
            )
        self._given = tuple(name for name in INPUTS if name in given)
        # NCCL sends no booleans, and DeepSpeed wants gradients of floating-point tensors.
        whole = (torch.int32, torch.int64)
        return tuple(each if each.dtype in whole else each.long() for each in map(given.__getitem__, self._given))

    def view(self, index: int, layer: nn.Module) -> nn.Module:
        """Return the layer of this index in the chain as its stage runs it."""
        part = self._parts.get(self.layers[index].name)
        return StageView(layer, _same if part is None else partial(self._run, part))

    @contextmanager
    def computed(self, step: str, outputs: Any, inputs: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model's base return what came out of the pipeline, while the user's step runs on the last stage.

        Args:
            step: its name, for messages.
            outputs: hidden states, and what went along with them.
            inputs: what went into the first stage, by name.

        Raises:
            UnfitModelError: the step does not call the model exactly once, with these inputs alone.
        """
        calls = 0

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            difference = _difference(_by_name(self._base, args, kwargs), inputs)
            if calls > 1 or difference:
                raise UnfitModelError(
                    f"{step} calls {type(self._model).__name__} {difference or 'a second time'}, but in a pipeline the "
                    f"micro-batch has gone through the stages already, once, with {' and '.join(inputs)} of the batch. "
                    "Call the model once with these; change them in on_after_batch_transfer, or choose others in a "
                    "method pipeline_batch(batch)."
                )
            return self._runner.output(self._named(outputs))

        self._base.forward = forward
        try:
            yield
        finally:
            del self._base.forward
        if not calls:
            raise UnfitModelError(
                f"{step} never calls {type(self._model).__name__}, so what the pipeline computed would go unused. Call "
                "the model, once."
            )

    def _run(self, part: str, inputs: Any) -> Any:
        named = self._named(inputs)
        states = self._runner.run(part, named)
        along = list(named.values())[1:]
        return (states, *along) if along else states

    def _named(self, inputs: Any) -> dict[str, Tensor]:
        return dict(zip(self._given, inputs if isinstance(inputs, tuple) else (inputs,), strict=True))

    def _build(self, name: str) -> NoReturn:
        raise UnfitModelError(
            f"{name} has no values: {type(self._model).__name__} was made on the meta device. Make it in "
            "configure_model with from_config() or load_pretrained(), without a device of your own."
        )


class StageView(nn.Module):
    """A layer as a stage runs it: the parameters, buffers and names of the layer, and another forward.

    The layer itself stays as it is: the model's own forward and the user's step run it.
    """

    def __init__(self, layer: nn.Module, run: Callable[[Any], Any]) -> None:
        super().__init__()
        shared = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
        vars(self).update({name: vars(layer)[name] for name in shared})
        self._run = run

    @override
    def forward(self, inputs: Any) -> Any:
        return self._run(inputs)


def _same(inputs: Any) -> Any:
    return inputs


def _only_model(module: nn.Module, recomputing: bool) -> tuple[str, PreTrainedModel]:
    """Return the model of a module and its name."""
    models = find_models(module)
    if len(models) != 1:
        raise UnfitModelError(
            f"{type(module).__name__} holds {len(models)} transformers models ({', '.join(models)}), and a pipeline "
            "cuts one. Keep the others outside of the module, or use azureml_model_parallel or azureml_ddp."
        )
    ((name, model),) = models.items()
    refusal = next(_refusals(module, name, model, recomputing), None)
    if refusal is not None:
        raise UnfitModelError(f"{type(model).__name__} {refusal}")
    return name, model


def _refusals(module: nn.Module, name: str, model: PreTrainedModel, recomputing: bool) -> Iterator[str]:
    above = [module.get_submodule(".".join(name.split(".")[:depth])) for depth in range(1, name.count(".") + 1)]
    if any(type(each).__module__.startswith("peft.") for each in above):
        yield "is wrapped by peft, which a pipeline cannot cut. azureml_ddp and azureml_model_parallel train adapters."
    if name.endswith("._orig_mod"):
        yield "was given to torch.compile as a whole, but runs in parts. Compile its blocks: block.compile()."
    if model.config.is_encoder_decoder:
        yield f"has an encoder and a decoder, and stages follow one another in one line. {_ELSEWHERE}"
    if not pipeline_plan(body(model)):
        yield f"has no plan for pipelines in transformers (base_model_pp_plan of its configuration). {_ELSEWHERE}"
    if recomputing and checkpoints_activations(model):
        yield (
            "recomputes activations itself, and the strategy's activation_checkpointing would do so again. Leave out "
            "gradient_checkpointing_enable() or activation_checkpointing."
        )
    for switch in recorded_outputs(model):
        yield f"has {switch}=True in its configuration, but most layers are in other processes. Set it to False."


def _part_runner(base: PreTrainedModel, has_weights: HasWeights) -> PartRunner:
    plan = pipeline_plan(base)
    try:
        return PartRunner(base, plan, has_weights)
    except (LookupError, ValueError) as error:
        raise UnfitModelError(
            f"{type(base).__name__} is not made of the parts {', '.join(plan)}, as its plan for pipelines says. "
            f"{_ELSEWHERE}"
        ) from error


def _beside(module: nn.Module, base: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules beside the model's base, and beside each module around it, from the outside to the inside."""
    parts = base.split(".")
    for depth, inside in enumerate(parts):
        owner = ".".join(parts[:depth])
        for name, child in module.get_submodule(owner).named_children():
            if name != inside:
                yield f"{owner}.{name}".lstrip("."), child


def _ties(tied: Mapping[str, str], layers: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return key and name of the shared parameter of each layer that has one."""
    places = [(key, name) for one, key in tied.items() for name in (one, key)]
    owned = {(layer, key, name) for layer in layers for key, name in places if name.startswith(f"{layer}.")}
    keys = {key for layer, key, _ in owned if not key.startswith(f"{layer}.")}  # of ties between layers
    shared = sorted((layer, key, name) for layer, key, name in owned if key in keys)
    several = [layer for layer, _, _ in shared]
    for layer in several:
        if several.count(layer) > 1:
            raise UnfitModelError(
                f"{layer} shares more than one parameter with other layers, and DeepSpeed's pipeline shares one. "
                f"{_ELSEWHERE}"
            )
    # DeepSpeed makes the key the name of a submodule, which has no dots.
    return {layer: (key.replace(".", "_"), name.removeprefix(f"{layer}.")) for layer, key, name in shared}


def _by_name(base: PreTrainedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a model by name, without those that change nothing."""
    signature = inspect.signature(type(base).forward)
    bound = signature.bind(base, *args, **kwargs).arguments
    named = {name: value for name, value in list(bound.items())[1:] if name != "kwargs"} | bound.get("kwargs", {})
    return {name: value for name, value in named.items() if value is not None and name not in _WITHOUT_EFFECT}


def _difference(given: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> str:
    """Describe in which arguments a call differs from what went into the pipeline; empty if in none."""
    asked = {name: value for name, value in given.items() if value is not False}
    more, less = sorted(asked.keys() - inputs.keys()), sorted(inputs.keys() - asked.keys())
    if more:
        return f"with {', '.join(more)}"
    if less:
        return f"without {', '.join(less)}"
    other = [name for name, value in inputs.items() if not _equal(asked[name], value)]
    return f"with other {', '.join(other)}" if other else ""


def _equal(given: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal; those in the same memory are not compared, which would wait for the GPU."""
    same_memory = given.data_ptr() == expected.data_ptr() and given.stride() == expected.stride()
    return given.shape == expected.shape and (same_memory or torch.equal(given, expected))
