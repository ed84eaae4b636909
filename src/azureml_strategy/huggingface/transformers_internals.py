"""The private names of transformers and peft that this package uses, and functions for all that needs them.

`tests/test_internals.py` checks each name on the oldest and the newest transformers that pyproject.toml allows. Nothing
is imported before it is needed: a module can only hold a model of transformers after the user's code has imported it.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)

INTERNALS: dict[str, dict[str, str]] = {
    "transformers.initialization": {
        "no_init_weights": "builds a model whose weights are about to be read",
    },
    "transformers.integrations.deepspeed": {
        "HfDeepSpeedConfig": "while it lives, transformers gathers parameters that DeepSpeed has cut",
        "_hf_deepspeed_config_weak_ref": "which one lives; there is no public way to hide it for a while",
    },
    "transformers.PreTrainedConfig": {
        "_attn_implementation": "the name of the attention function in use; a configuration shows it nowhere else",
        "_experts_implementation": "that of the function for experts",
    },
    "transformers.modeling_utils": {
        "LoadStateDictConfig": "how weights are read: type, device, conversions",
        "_is_ds_init_called": "tells from_config that deepspeed.zero.Init is active already",
        "local_torch_dtype": "makes the type of a model torch's own while it is built",
        "str_to_torch_dtype": "types by their names in safetensors files",
    },
    "transformers.models.auto.auto_factory": {
        "_get_model_class": "the class that AutoModelForCausalLM and others choose",
    },
    "transformers.models.auto.auto_factory._BaseAutoModelClass": {
        "_model_mapping": "what they choose from",
    },
    "transformers.modeling_utils.PreTrainedModel": {
        "_is_stateful": "it has layers that pass a state from token to token",
        "_supports_attention_backend": "its attention comes from the registry",
        "_from_config": "a model of the class, for its structure; the public from_config belongs to the Auto classes",
        "_get_dtype_plan": "which weights stay in float32",
        "_init_weights": "initial values of what no file has",
        "_load_pretrained_model": "reads weights into parameters that are already cut",
        "_no_split_modules": "the classes of its blocks",
        "_tp_plan": "how its layers are cut; the property tp_plan is missing in some versions",
    },
    "transformers.conversion_mapping": {
        "get_model_conversion_mapping": "names and layouts of weights in files of other versions",
    },
}
# The module with the base class of all models. It is imported before anyone can build one.
MODELS = "transformers.modeling_utils"
# The functions there that read a model's weights, and those that build one and ask whether DeepSpeed cuts it.
_READERS = {"from_pretrained", "_load_pretrained_model"}
_BUILDERS = {*_READERS, "_from_config"}
# The styles of transformers' tensor-parallel plans that ours have as well, and their names here.
_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather_output",
    "embedding_rowwise": "rowwise",
    "replicated_with_grad_allreduce": "sum_gradients",
}

# Keys of configurations whose values transformers or peft import, or fetch from the hub and import.
KEYS_OF_CODE = (
    *("auto_map", "auto_mapping", "megatron_core", "megatron_config"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
)


def is_pretrained_model(module: object) -> TypeGuard[PreTrainedModel]:
    """Whether a module is a model of transformers."""
    transformers = sys.modules.get(MODELS)
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def find_models(module: nn.Module) -> dict[str, PreTrainedModel]:
    """Return the models of transformers in a module by their names in it, without those inside another model.

    A model that `peft` has wrapped is found below the wrapper.
    """
    found: dict[str, PreTrainedModel] = {}
    for name, each in module.named_modules():
        inside = any(name.startswith(f"{outer}.") or outer == "" for outer in found)
        if is_pretrained_model(each) and not inside:
            found[name] = each
    return found


def body(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model without its head: the model itself if it has none."""
    return cast("PreTrainedModel", model.base_model)


# The parts of models for which transformers has no plan, in the order in which their forward runs them.
_OWN_PLANS = {"gpt2": ("wte", "wpe", "drop", "h", "ln_f")}


def pipeline_plan(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the parts of a base model in the order they run in, the list of blocks among them.

    Empty for a model without a plan for pipelines.
    """
    plan: Iterable[str] = model.config.base_model_pp_plan or ()
    return tuple(plan) or _OWN_PLANS.get(model.config.model_type, ())


def tied_weights(model: PreTrainedModel) -> dict[str, str]:
    """Return the parameters of a model that are another one, by their full names."""
    return dict(model.all_tied_weights_keys)


def recorded_outputs(model: PreTrainedModel) -> list[str]:
    """Return the switches of a model's configuration by which it returns what its layers computed on the way."""
    names = ("output_hidden_states", "output_attentions", "output_router_logits")
    return [name for name in names if getattr(model.config, name, False)]


def find_peft_models(module: nn.Module) -> dict[str, PeftModel]:
    """Return the models that `peft.get_peft_model` has wrapped, by their names in a module."""
    peft = sys.modules.get("peft")
    if peft is None:
        return {}
    return {name: each for name, each in module.named_modules() if isinstance(each, peft.PeftModel)}


def adapters_around(module: nn.Module, model: PreTrainedModel) -> list[nn.Module]:
    """Return what `peft` has wrapped around a model of a module.

    It calls the model or, past the model's hooks, the model's forward.
    """
    wrappers = [each for each in find_peft_models(module).values() if each.get_base_model() is model]
    return [each.base_model for each in wrappers if each.base_model is not model]


def buffers_in_float32(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str]]:
    """Yield the buffers that transformers keeps in float32 in models of 16 bits, as owner and name in it.

    A twin of each model is made on the meta device with weights of `dtype`, to see the types of its buffers. A table
    that a model's code multiplies with its weights is not yielded: transformers makes that one in 16 bits. No code of a
    model that is from the hub is run for it.
    """
    seen: set[Tensor] = set()
    for model in filter(is_pretrained_model, module.modules()):
        own = {name: each for name, each in model.named_buffers() if each.dtype == torch.float32 and each not in seen}
        twins = _buffers_of_twin(model, dtype) if own else {}
        plan = _plan_in_float32(model, dtype)
        for name in filter(twins.__contains__, own):
            seen.add(own[name])
            if twins[name].dtype == torch.float32 or (plan and plan.search(name)):
                owner, _, attribute = name.rpartition(".")
                yield model.get_submodule(owner), attribute


def parameters_in_float32(module: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Return the parameters that transformers keeps in float32 in models in 16 bits, by their names in a module."""
    found = {}
    for name, model in find_models(module).items():
        plan = _plan_in_float32(model, dtype)
        for inner, parameter in model.named_parameters() if plan else ():
            if plan and plan.search(inner) and parameter.is_floating_point():
                found[f"{name}.{inner}".lstrip(".")] = parameter
    return found


def expects_float32_by_default(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the models in a module whose code is all of torch, transformers and peft.

    That code is written for torch's own default type, whatever the type of the weights: DeBERTa computes the places
    of tokens by it.
    """
    for model in find_models(module).values():
        if {type(each).__module__.partition(".")[0] for each in model.modules()} <= {"torch", "transformers", "peft"}:
            yield model


def _plan_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return the pattern by which transformers finds the names of tensors that stay in float32; None without any."""
    names = [name for name, kept in model._get_dtype_plan(dtype).items() if kept == torch.float32]
    return re.compile("|".join(name.replace("*", ".*") for name in names)) if names else None


def _buffers_of_twin(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the buffers of a model as transformers would make it in another type; none if it cannot be made.

    Nothing is downloaded: attention functions and experts that are from the hub are replaced by transformers' own.
    """
    kind: Any = _library_kind(model)
    if kind is None or not isinstance(model.config, kind.config_class or ()):
        return {}
    config = copy.deepcopy(model.config)
    config._attn_implementation = config._experts_implementation = "eager"
    try:
        with torch.device("meta"), whole_models():
            twin = kind._from_config(config, dtype=dtype)
    except Exception as error:  # a subclass may have a configuration that its base cannot be built from
        _log.debug("%s cannot be built from %s: %s", kind.__name__, type(config).__name__, error)
        return {}
    own = dict(model.named_buffers())
    return {name: each for name, each in twin.named_buffers() if name in own and own[name].shape == each.shape}


def _library_kind(model: PreTrainedModel) -> type | None:
    """Return the class of transformers that a model's class is or derives from; None for one that is from the hub."""
    return next((kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")), None)


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Let torch make float32 where code names no type, as transformers' code expects it.

    Under `bf16-true` and `16-true`, Lightning lets torch make 16 bits. A table that is computed in these is wrong.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def computes_frequencies(module: nn.Module) -> bool:
    """Whether a module computes rotary frequencies anew in its forward, by the length of the sequence."""
    return type(module).__module__.startswith("transformers.") and "dynamic" in str(getattr(module, "rope_type", ""))


def is_tokenizer(value: object) -> bool:
    """Whether an object is a tokenizer of transformers, or a processor, which holds one."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(
        value, (transformers.PreTrainedTokenizerBase, transformers.ProcessorMixin)
    )


def cache_class() -> type | None:
    """Return the class of caches of keys and values of earlier tokens; None if transformers is not imported."""
    caches = sys.modules.get("transformers.cache_utils")
    return None if caches is None else cast(type, caches.Cache)


def library_class(model: PreTrainedModel) -> str:
    """Return the name of a model's class in transformers. A subclass of the user's counts as what it derives from."""
    import transformers

    names = [kind.__name__ for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")]
    return next((name for name in names if hasattr(transformers, name)), type(model).__name__)


def loaded_by_from_pretrained(model: PreTrainedModel) -> bool:
    """Whether `from_pretrained` has read a model's weights, so that they can be read again.

    The name of a folder does not prove it: a model that is made from a configuration may have that of its
    configuration. Loading leaves the conversions of names that it used, except under ZeRO-3.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    by_deepspeed: bool = is_deepspeed_zero3_enabled()  # type: ignore[no-untyped-call]
    return bool(model.name_or_path) and (hasattr(model, "_weight_conversions") or by_deepspeed)


def mark_loaded(parameter: Tensor) -> None:
    """Mark a parameter as read from files, so that transformers keeps its values."""
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def is_loaded(parameter: nn.Parameter) -> bool:
    """Whether `from_pretrained` has read a parameter from files, and not initialised it, as that of a new head."""
    return bool(getattr(parameter, "_is_hf_initialized", False))


def commit_of(model: PreTrainedModel) -> str | None:
    """The commit of the hub's repository that a model is from; None for a folder."""
    commit: str | None = getattr(model.config, "_commit_hash", None)
    return commit


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks of a model that may each be gathered by itself, as its class names them."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    inner = {each for block in blocks for each in block.modules() if each is not block}
    return [block for block in blocks if block not in inner]


def tensor_parallel_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return how the model's own plan cuts its layers: our style for each name; empty if there is no plan.

    A style that is not known here keeps transformers' name, for an error that names it.
    """
    plan: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    return {name: _STYLES.get(style, style) for name, style in plan.items()}


def head_counts(model: PreTrainedModel) -> dict[str, int]:
    """Return the numbers that a tensor-parallel size must divide, by what they count."""
    text = model.config.get_text_config()
    counts = {
        "heads": getattr(text, "num_attention_heads", None),
        "heads of keys and values": getattr(text, "num_key_value_heads", None),
    }
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def attention_name(model: PreTrainedModel) -> str:
    """Return the name of a model's attention function, such as `sdpa`."""
    return str(model.config._attn_implementation)


def stock_attention(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return an attention function of transformers, and the one that makes its masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[name], ALL_MASK_ATTENTION_FUNCTIONS[name]


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Add an attention function that models can be told to use, and the one that makes its masks."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def has_registered_attention(model: PreTrainedModel) -> bool:
    """Whether a model calls an attention function from the registry, where it can be replaced by another."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = attention_name(model)
    registered = name in ALL_ATTENTION_FUNCTIONS and name in ALL_MASK_ATTENTION_FUNCTIONS
    return registered and bool(model._supports_attention_backend)


def passes_state_on(model: PreTrainedModel) -> bool:
    """Whether a model has layers that compute tokens one after the other, from a state."""
    return bool(model._is_stateful)


def has_usual_loss(model: PreTrainedModel) -> bool:
    """Whether a model's loss is that of transformers for causal language models."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss


def has_usual_forward(model: PreTrainedModel) -> bool:
    """Whether a model's forward is that of its class in transformers, which a subclass may replace."""
    kinds: list[Any] = [kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")]
    return bool(kinds) and type(model).forward is kinds[0].forward


def is_causal_language_model(model: PreTrainedModel) -> bool:
    """Whether a model is of a class that AutoModelForCausalLM chooses."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return library_class(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def checkpoints_activations(model: PreTrainedModel) -> bool:
    """Whether `gradient_checkpointing_enable` was called."""
    return bool(model.is_gradient_checkpointing)


def sketch(
    cls: Any, config: Any, files: list[Path], dtype: torch.dtype
) -> tuple[Any, list[str], list[tuple[str, torch.Size, torch.Size]], list[str]]:
    """Make a model whose weights have no values yet. Only the headers of its safetensors files are read.

    Returns:
        The model, in which what the files lack has its initial values; the names of the tensors that the files have;
        name, shape in the files and shape in the model of each that does not fit; and the names of those that have no
        values at all, as neither a file has them nor the model's code sets them.
    """
    from safetensors import safe_open

    headers: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt", backend="pread") as opened:
            for name in opened.keys():  # noqa: SIM118 # it is no mapping
                headers[name] = torch.empty(opened.get_slice(name).get_shape(), dtype=dtype, device="meta")
    with _without_progress(), whole_models():
        model, report = cls.from_pretrained(
            None,
            config=config,
            state_dict=headers,
            dtype=dtype,
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    mismatched = sorted(report["mismatched_keys"])
    absent = {*report["missing_keys"], *(name for name, *_ in mismatched)}
    in_files = [name for name in model.state_dict() if name not in absent]
    return model, in_files, mismatched, _initialize_rest(model, set(in_files))


def read_parts(
    cls: Any,
    config: Any,
    wanted: Mapping[str, Tensor],
    slices: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Read tensors of a model from files. transformers renames and converts them, and reads shards only.

    Args:
        cls: class of the model.
        config: its configuration.
        wanted: tensors without values, by their names in the model. Of a DTensor only this rank's shard is read.
        slices: the tensors of its files, as `FileSlice`s, by their names there.
        dtype: of the model's weights.
        device: where the tensors go.

    Returns:
        Those of the wanted tensors that the files have.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    with torch.device("meta"), whole_models():
        twin = cls._from_config(copy.deepcopy(config), dtype=dtype)
    for name in [*dict(twin.named_parameters(remove_duplicate=False)), *dict(twin.named_buffers())]:
        owner, _, attribute = name.rpartition(".")
        setattr(twin.get_submodule(owner), attribute, wanted.get(name))
    how = LoadStateDictConfig(
        dtype=dtype,
        dtype_plan=twin._get_dtype_plan(dtype),
        device_map={"": device},
        weight_mapping=cast(Any, get_model_conversion_mapping(twin, None, None)),
    )
    with _without_progress(), whole_models():
        twin._load_pretrained_model(twin, dict(slices), None, how)
    return {name: tensor for name, tensor in twin.state_dict(keep_vars=True).items() if not tensor.is_meta}


def _initialize_rest(model: PreTrainedModel, in_files: set[str]) -> list[str]:
    """Give initial values to what no file has, such as new heads; return the names of those that no code has set."""
    made: dict[str, Tensor] = {}
    for owner, module in model.named_modules():
        for name, tensor in {**module._parameters, **module._buffers}.items():
            path = f"{owner}.{name}".lstrip(".")
            if tensor is not None and path not in in_files:
                unset = torch.full_like(tensor, _unset(tensor.dtype), device="cpu")
                setattr(module, name, nn.Parameter(unset) if name in module._parameters else unset)
                made[path] = getattr(module, name)
    with torch.no_grad():
        _initialize(model, model, set(map(id, made.values())))
    # It may have replaced the tensors.
    return [path for path in made if _is_unset(attrgetter(path)(model))]


def _initialize(module: nn.Module, model: PreTrainedModel, made: set[int]) -> None:
    """Run each model's own initialisation on its layers that hold something of `made`, inner layers first."""
    for child in module.children():
        _initialize(child, child if is_pretrained_model(child) else model, made)
    if any(id(each) in made for each in (*module.parameters(), *module.buffers())):
        model._init_weights(module)  # type: ignore[no-untyped-call]


def _unset(dtype: torch.dtype) -> float | int:
    """A value that no code sets: a tensor that still has it was not initialised."""
    if dtype.is_floating_point or dtype.is_complex:
        return math.nan
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def _is_unset(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype in (torch.bool, torch.uint8):
        return False
    unset = _unset(tensor.dtype)
    return bool((tensor.isnan() if math.isnan(unset) else tensor == unset).all())


@contextmanager
def _without_progress() -> Iterator[None]:
    """Silence the progress bars of transformers: each rank would draw its own."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def declare_zero_3(config: dict[str, Any], cuts: Callable[[], bool]) -> object:
    """Tell transformers that DeepSpeed cuts parameters, for as long as the returned object lives.

    `from_pretrained` and others then gather parameters where they need them, and `generate` and some models' forwards
    let all ranks take the same number of steps. But a model that the user builds during the training, such as a
    teacher, is no part of what DeepSpeed trains, and nobody would gather its parameters: it is built whole.

    Args:
        config: DeepSpeed's configuration, with stage 3.
        cuts: whether a model that is built now is cut.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    class Declared(HfDeepSpeedConfig):
        def is_zero3(self) -> bool:
            return bool(super().is_zero3()) and (cuts() or not _is_inside(_BUILDERS))

    return Declared(config)  # type: ignore[no-untyped-call]


def reads_weights() -> bool:
    """Whether this thread is inside of a function of transformers that reads a model's weights."""
    return MODELS in sys.modules and _is_inside(_READERS)


def _is_inside(functions: set[str]) -> bool:
    """Whether this thread is inside of one of the functions of transformers that build models."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        if frame.f_code.co_name in functions and frame.f_globals.get("__name__") == MODELS:
            return True
        frame = frame.f_back
    return False


@contextmanager
def whole_models() -> Iterator[None]:
    """Let transformers build whole models, even if this process has declared ZeRO-3."""
    from transformers.integrations import deepspeed as integration

    alive, integration._hf_deepspeed_config_weak_ref = integration._hf_deepspeed_config_weak_ref, None
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = alive


@contextmanager
def inside_zero_init() -> Iterator[None]:
    """Tell transformers that `deepspeed.zero.Init` is active already: `from_config` then builds as a constructor does.

    Otherwise `from_config` gathers the parameters of a module and its children and lets rank 0 initialise them. That
    misses what an `_init_weights` sets further down, and the weights differ from those of the same seed without
    DeepSpeed.

    The parameters get DeepSpeed's type, and tables are computed in float32 whatever type is asked for. Without
    DeepSpeed, transformers does not compute them in the model's type either.
    """
    from transformers import modeling_utils

    in_type = modeling_utils.local_torch_dtype
    modeling_utils._is_ds_init_called = True
    modeling_utils.local_torch_dtype = lambda *_: float32_by_default()
    try:
        yield
    finally:
        modeling_utils._is_ds_init_called = False
        modeling_utils.local_torch_dtype = in_type


def no_first_weights() -> AbstractContextManager[None]:
    """Leave weights uninitialised while a model is built. Those that its checkpoint lacks are initialised later."""
    from transformers.initialization import no_init_weights

    context: AbstractContextManager[None] = no_init_weights()
    return context


def torch_type(name: str) -> torch.dtype:
    """Return torch's type for the name of a type in a safetensors file, such as `BF16`."""
    from transformers.modeling_utils import str_to_torch_dtype

    dtype: torch.dtype = str_to_torch_dtype[name]
    return dtype


def class_for(model_class: type[Any], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a model with a configuration, which classes such as `AutoModelForCausalLM` choose by it.

    Raises:
        ValueError: the class has no model for the configuration.
    """
    from transformers.models.auto.auto_factory import _get_model_class

    mapping = getattr(model_class, "_model_mapping", None)
    if mapping is None:
        return model_class
    if type(config) not in mapping:
        raise ValueError(
            f"{model_class.__name__} has no model for {type(config).__name__}. Give a class of transformers that has, "
            "or the model's own."
        )
    chosen: type[PreTrainedModel] = _get_model_class(config, mapping)  # type: ignore[no-untyped-call]
    return chosen
