from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest

from azureml_strategy.training.app import tidy_console


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    import lightning.pytorch  # noqa: F401 - adds its handlers

    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    before = [(logger, list(logger.handlers), logger.level) for logger in loggers]
    with warnings.catch_warnings():
        yield
    for logger, handlers, level in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)


def test_lightnings_lines_appear_once_and_its_warnings_stay(caplog: pytest.LogCaptureFixture) -> None:
    lightning = logging.getLogger("lightning")
    lightning.addHandler(logging.StreamHandler())
    tidy_console()
    assert not lightning.handlers
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).info("a tip")
        logging.getLogger(name).warning("a warning")
    assert [record.message for record in caplog.records] == ["a warning"] * 2


def test_only_the_deprecation_that_nobody_can_mend_is_hidden() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()  # PYTHONWARNINGS may hide the other one
        tidy_console()
        warnings.simplefilter("always", append=True)
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("another", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in seen] == ["another"]
