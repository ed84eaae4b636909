"""The way to azure-ai-ml: whether it is installed, and its notes to its own developers off the user's screen."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module

from azureml_strategy.jobs.errors import JobError

# Marks of experimental classes, that a Studio link has no tenant, that a credential of a chain was not there: each is
# logged as a warning, and none of it is anything that the user could change. What went wrong is raised as well.
_LOGGERS = ("azure.ai.ml", "azure.identity", "azure.core")


def quiet_sdk() -> None:
    """Import azure-ai-ml so that it, and what it stands on, logs nothing.

    Whatever leads to Azure passes here before it imports anything else of Azure's.

    Raises:
        JobError: the extra `azure` is not installed.
    """
    warnings.filterwarnings("ignore", module=r"azure\.ai\.ml")
    import_azure("azure.ai.ml")
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # On import it gives itself, and some loggers below, a level and a way to the screen of their own.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("azure.ai.ml") and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.setLevel(logging.CRITICAL)


def import_azure(name: str) -> None:
    """Import a module of the extra `azure`.

    Raises:
        JobError: it is not installed.
    """
    try:
        import_module(name)
    except ImportError as error:
        raise JobError(
            f"What talks to Azure is not installed here ({error}). Type: pip install 'azureml-strategy[azure]'"
        ) from error
