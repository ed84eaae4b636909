from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
from lightning.pytorch import Trainer

from azureml_strategy.strategies.compilation import compilation
from azureml_strategy.training.app import LIGHTNINGS_LOGGERS, tidy_console


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LIGHTNINGS_LOGGERS]
    before = [(logger, list(logger.handlers), logger.propagate) for logger in loggers]
    filters = [(handler, list(handler.filters)) for handler in logging.getLogger().handlers]
    with warnings.catch_warnings():
        yield
    for logger, handlers, propagates in before:
        logger.handlers[:] = handlers
        logger.propagate = propagates
    for handler, before_it in filters:
        handler.filters[:] = before_it


def test_lightnings_lines_appear_once_and_its_warnings_stay(caplog: pytest.LogCaptureFixture) -> None:
    loggers = [logging.getLogger(name) for name in LIGHTNINGS_LOGGERS]
    for logger in loggers:
        logger.addHandler(logging.StreamHandler())
    tidy_console()
    assert not any(logger.handlers for logger in loggers)
    Trainer(accelerator="cpu", logger=False)  # has a tip
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).warning("a warning")
    assert [record.message for record in caplog.records] == ["a warning"] * 2


@pytest.mark.parametrize("package", ["lightning.pytorch", "lightning.fabric", "pytorch_lightning"])
def test_our_lines_and_a_users_stay(
    package: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go through Lightning's logger as well, for rank 0 alone to write them."""
    from lightning.pytorch.trainer import trainer
    from lightning.pytorch.utilities import rank_zero_info

    logger = logging.getLogger(f"{package}.utilities.rank_zero")
    monkeypatch.setattr("lightning_utilities.core.rank_zero.log", logger)  # of what was imported last
    caplog.set_level(logging.INFO, logger.name)  # as the import does
    names = {"rank_zero_info": rank_zero_info}
    tidy_console()
    for file in (compilation.__file__, "/home/somebody/train.py", trainer.__file__):
        exec(compile("rank_zero_info('a line of ' + __file__)", file, "exec"), names | {"__file__": file})
    assert [(each.name, each.message) for each in caplog.records] == [
        ("azureml_strategy.strategies.compilation.compilation", f"a line of {compilation.__file__}"),
        (logger.name, "a line of /home/somebody/train.py"),
    ]


def test_only_the_deprecation_that_nobody_can_mend_is_hidden() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()  # PYTHONWARNINGS may hide the other one
        tidy_console()
        warnings.simplefilter("always", append=True)
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated", FutureWarning, stacklevel=1)
        warnings.warn("another", FutureWarning, stacklevel=1)
    assert [str(each.message) for each in seen] == ["another"]
