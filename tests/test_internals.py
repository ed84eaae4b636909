"""Each private name of Lightning, DeepSpeed, transformers and azure-ai-ml stands in one file, with its reason."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import azureml_strategy
from azureml_strategy import lightning_internals
from azureml_strategy.huggingface import transformers_internals
from azureml_strategy.jobs import azure_internals
from azureml_strategy.strategies import deepspeed_internals

# Programs, and a script that only Azure ML's inference server can run.
NOT_IMPORTED = ("__main__", ".serving.online")
SOURCES = Path(azureml_strategy.__file__).parent
BENCHMARKS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))
LIBRARIES = ("lightning", "lightning_utilities", "pytorch_lightning", "deepspeed", "azure", "transformers", "peft")
LISTED = {
    Path(str(house.__file__)): house.INTERNALS
    for house in (lightning_internals, deepspeed_internals, azure_internals, transformers_internals)
}
# Private names of others, which stand where they are used.
OTHERS = {
    "python": {"_SubParsersAction", "_Hash", "_asdict", "_current_frames", "_exit", "_getframe", "_replace"},
    "torch": {
        *(
            "_BatchNorm",
            "_forward_hooks",
            "_forward_pre_hooks",
            "_NormBase",
            "_is_mkldnn_bf16_supported",
            "_overloadpacket",
            "_schema",
            "_iterator",
            "_spec",
            "_tensor_name",
        ),
        *(
            "_MEM_FORMAT_ENCODING",
            "_schema",
            "_StorageInfo",
            "_StoragePrefix",
            "_base",
            "_buffers",
            "_get_layout",
            "_neg_view",
            "_parameters",
            "_version",
            "_world",
        ),
        *("_fsdp_param_group", "_fsdp_param_groups", "_get_fsdp_state", "_is_root", "_module_info", "_state_ctx"),
        *("_cdata", "_lazy_init", "_root_post_backward_final_callback"),
        *("_step_supports_amp_scaling", "_call_impl", "_compiled_call_impl", "_dynamo", "_functorch", "_inductor"),
        *("_is_profiler_enabled", "_set_is_profiler_enabled", "_new_shared", "_upsample_bilinear2d_aa"),
        *(
            "_backward_hooks",
            "_backward_pre_hooks",
            "_autograd_hook",
            "_check_reducer_finalized",
            "_execution_engine",
            "_foreach_copy_",
            "_join_config",
            "_foreach_norm",
            "_reset_state",
            "_post_accumulate_grad_hooks",
            "_per_optimizer_states",
            "_get_ddp_logging_data",
            "_set_ddp_runtime_logging_sample_rate",
            "_stance",
            "_non_persistent_buffers_set",
            "_sleep",
        ),
    },
    # DeepSpeed sets these on parameters, where no class shows them.
    "deepspeed": {
        *("_dp_group", "_hp_grad", "_hp_mapping", "_index_in_param_group", "_z3_optimizer", "_zero_optimizer"),
    },
    "torchmetrics": {"_cache", "_compute_groups_create_state_ref", "_defaults", "_groups_checked", "_state_is_copy"},
    "omegaconf": {"_get_node", "_get_parent", "_invalidate_flags_cache", "_key", "_metadata"},
    "transformers": {"_is_hf_initialized"},
    "mlflow": {"_active_experiment_id", "_METHOD_TO_INFO", "_call_endpoint", "_tracking_client"},
}


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for table in LISTED.values() for owner, names in table.items() for name in names]
)
def test_a_name_that_is_listed_exists(owner: str, name: str) -> None:
    assert name in _members(pkgutil.resolve_name(owner))


@pytest.mark.parametrize("house", LISTED, ids=lambda house: house.stem)
def test_a_name_that_is_listed_has_a_reason_and_is_used(house: Path) -> None:
    reasons = {name: reason for names in LISTED[house].values() for name, reason in names.items()}
    assert [name for name, reason in reasons.items() if not reason] == []
    used = {name for path in _files() for name in _mentioned(path)}
    assert reasons.keys() - used == set()


def test_other_files_use_no_private_name_of_a_library() -> None:
    """A new one is to be listed in its library's file, and used by a function or class from there."""
    found = [f"{path}:{line} {name}" for path in [*_files(), *BENCHMARKS] for line, name in _foreign(path)]
    assert found == []


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_what_a_benchmark_asks_of_the_package_exists(path: Path) -> None:
    """What it imports; and each private name in a class that extends one of the package's.

    One that the package no longer has ends the benchmark, or is set and overridden without any effect.
    """
    ours = _imported(_tree(path))
    gone = {
        f"{kind.name}.{name}"
        for kind in ast.walk(_tree(path))
        if isinstance(kind, ast.ClassDef)
        for base in kind.bases
        if ast.unparse(base) in ours
        for name in _private_names(kind) - _members(ours[ast.unparse(base)])
    }
    assert gone == set()


def test_a_private_name_that_a_subclass_shares_with_its_base_is_listed() -> None:
    """It may be used by intention, or stand for two things by chance."""
    shared = {
        f"{own.__module__}.{own.__name__}.{name}, of {base.__module__}.{base.__name__}"
        for own in _subclasses()
        for part in own.__mro__
        for name in _used_on_itself(part)
        for base in own.__mro__
        if _is_of_library(base) and name in vars(base).keys() | _set_on_self(base) and name not in _listed_for(own)
    }
    assert shared == set()


def _foreign(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the private names that a file uses of others, with their lines."""
    tree, table = _tree(path), LISTED.get(path, {})
    here = {part for owner, names in table.items() for part in (*owner.split("."), *names)}
    listed = {name for each in LISTED.values() for names in each.values() for name in names if _is_private(name)}
    others = {name for names in OTHERS.values() for name in names}
    allowed = here | ((others | _defined(tree)) - listed)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in LIBRARIES:
            parts = {*str(node.module).split("."), *(each.name for each in node.names)}
            yield from ((node.lineno, part) for part in parts - here if _is_private(part))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_of_itself(node, tree):
            if node.attr not in allowed:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in listed - here - others:
            yield node.lineno, node.value


def _listed_for(own: type) -> set[str]:
    owners = {f"{base.__module__}.{base.__name__}" for base in own.__mro__}
    return {name for table in LISTED.values() for owner in owners & table.keys() for name in table[owner]}


def _subclasses() -> Iterator[type]:
    """Yield the package's classes that have a base of such a library."""
    for each in pkgutil.walk_packages(azureml_strategy.__path__, f"{azureml_strategy.__name__}."):
        members = vars(import_module(each.name)).values() if not each.name.endswith(NOT_IMPORTED) else ()
        for kind in filter(inspect.isclass, members):
            if kind.__module__ == each.name and any(map(_is_of_library, kind.__mro__)):
                yield kind


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES


def _used_on_itself(kind: type) -> set[str]:
    """The private names that a class of the package uses of itself or its bases, or overrides."""
    if not kind.__module__.startswith(azureml_strategy.__name__):
        return set()
    return _private_names(_source(kind))


def _private_names(tree: ast.AST) -> set[str]:
    """The private names that a class uses of itself or its bases, or overrides."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {node.attr for node in attributes if _is_private(node.attr) and _is_of_itself(node, tree)}
    return read | set(filter(_is_private, _defined(tree)))


def _imported(tree: ast.AST) -> dict[str, Any]:
    """What a file imports from the package, by the names that it gives them."""
    lines = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in lines if str(node.module).partition(".")[0] == azureml_strategy.__name__]
    return {
        each.asname or each.name: pkgutil.resolve_name(f"{node.module}.{each.name}")
        for node in ours
        for each in node.names
    }


def _members(owner: ModuleType | type) -> set[str]:
    """What a module or a class has; also what methods set, or what the module's `__getattr__` makes when it is used."""
    if isinstance(owner, ModuleType):
        maker = vars(owner).get("__getattr__")
        made = ast.walk(_source(maker)) if maker is not None else ()
        return set(vars(owner)) | {node.value for node in made if isinstance(node, ast.Constant)}
    return {name for base in owner.__mro__ for name in vars(base).keys() | _set_on_self(base)}


@cache
def _set_on_self(kind: type) -> set[str]:
    stored = {
        ast.unparse(node) for node in ast.walk(_source(kind)) if isinstance(getattr(node, "ctx", None), ast.Store)
    }
    return {name.removeprefix("self.") for name in stored if name.startswith("self.")}


@cache
def _source(kind: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError):  # written in C, or generated
        return ast.Module([], [])


@cache
def _files() -> list[Path]:
    return sorted(SOURCES.rglob("*.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _mentioned(path: Path) -> Iterator[str]:
    """Yield the names in a file, and its strings but for those of the list itself."""
    tree = _tree(path)
    dicts = [each for each in tree.body if path in LISTED and isinstance(getattr(each, "value", None), ast.Dict)]
    own = {id(node) for each in dicts for node in ast.walk(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own:
            yield node.value
        elif isinstance(node, (ast.FunctionDef, ast.alias)):
            yield node.name


@cache
def _defined(tree: ast.AST) -> set[str]:
    """The names that a file or class defines itself."""
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    stored = {ast.unparse(node) for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)}
    return functions | {name.removeprefix("self.") for name in stored}


def _is_of_itself(node: ast.Attribute, tree: ast.AST) -> bool:
    """Whether an attribute is the object's own or of a base class, which the test of subclasses looks at."""
    return ast.unparse(node.value) in {"self", "cls", "super()"} | _bases(tree)


@cache
def _bases(tree: ast.AST) -> set[str]:
    return {ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_")


def test_what_a_pipeline_asks_of_transformers_exists() -> None:
    """These names are public, but the plans among them move."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1)
    config.num_hidden_layers = 1
    model = transformers.LlamaForCausalLM(config)
    assert list(config.base_model_pp_plan) == ["embed_tokens", "layers", "norm"]
    assert model.all_tied_weights_keys == {}
    assert model.base_model is model.model
    assert model.model.layers[0].gradient_checkpointing is False
