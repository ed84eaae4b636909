"""Makes the recipes and configuration groups of azureml-strategy available to every Hydra application."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin
from typing_extensions import override

from azureml_strategy.training.resolvers import register_resolvers


class AzureMLSearchPath(SearchPathPlugin):
    """Appends both folders to the end of the search path, so an application's own files of the same name win."""

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        register_resolvers()
        search_path.append(provider="azureml-strategy", path="pkg://azureml_strategy.recipes")
        search_path.append(provider="azureml-strategy", path="pkg://azureml_strategy.conf")
