"""Parameters that several layers share, such as an embedding and the output matrix."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from azureml_strategy.strategies.errors import ConfigurationError

# Every place of one parameter: the name of the module, and the parameter's name in it.
Places = list[tuple[str, str]]


def shared_parameters(module: nn.Module) -> list[Places]:
    """The places of each parameter that has more than one."""
    places: defaultdict[nn.Parameter, Places] = defaultdict(list)
    for owner, submodule in module.named_modules():
        for name, parameter in submodule.named_parameters(recurse=False):
            places[parameter].append((owner, name))
    return [owners for owners in places.values() if len(owners) > 1]


def tie_again(module: nn.Module, shared: list[Places]) -> None:
    """Make one parameter of those that were one before each place got a cut of its own.

    Args:
        module: holds all places.
        shared: what `shared_parameters` found before.

    Raises:
        ConfigurationError: they are cut in different ways.
    """
    for places in shared:
        parameters = [module.get_submodule(owner).get_parameter(name) for owner, name in places]
        if len({getattr(parameter, "placements", None) for parameter in parameters}) > 1:
            raise ConfigurationError(
                f"{' and '.join(f'{owner}.{name}' for owner, name in places)} are one parameter, but the "
                "tensor-parallel plan cuts them in different ways. Rows of a tied embedding are columns of the output "
                "matrix: write 'rowwise' for the one and 'colwise_gather_output' for the other, or name neither."
            )
        for owner, name in places[1:]:
            module.get_submodule(owner).register_parameter(name, parameters[0])
