"""Lightning's logger for Weights & Biases, for runs that belong to a job or have secrets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import override

from azureml_strategy.cluster.redaction import redact, redact_text
from azureml_strategy.lightning_internals import convert_params
from azureml_strategy.tracking.store import TrackingError

# Otherwise wandb records the command line, and the console before secrets are removed from it.
_SETTINGS = {"console": "off", "x_disable_meta": True}


class JobWandbLogger(WandbLogger):
    """Logs into one wandb run, without secrets.

    It differs from Lightning's logger in this: hyperparameters are recorded without secrets; wandb records neither the
    console nor the command line; a server that cannot be reached, or a missing key, is an error of one sentence; and
    `close` ends the run, so that the next run of a sweep gets one of its own.

    Args:
        project: of the run; else WANDB_PROJECT, else `lightning_logs`.
        name: of the run; by default the recipe and its overrides.
        id: of the run. An existing run of this id goes on, which is how a restarted job continues.
        save_dir: where wandb keeps its files.
        offline: whether to write files only, for `wandb sync`; needs no network and no key.
        log_model: as in Lightning.
        prefix: put before metric names, with a dash.
        settings: for `wandb.init`.
        options: further arguments of `wandb.init`, such as `entity` and `group`.

    Raises:
        TrackingError: (on first use) wandb does not start the run.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,  # noqa: A002 - wandb's own name of it
        save_dir: str = ".",
        offline: bool = False,
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if offline:
            options["mode"] = "offline"  # Lightning's own way sets WANDB_MODE for all further runs of this process
        super().__init__(
            name=name,
            save_dir=save_dir,
            project=project,
            id=id,
            log_model=log_model,
            prefix=prefix,
            settings={**_SETTINGS, **(settings or {})},
            **options,
        )
        if offline and log_model:
            raise ValueError("log_model uploads checkpoints, which offline=true cannot. Set one of them to false.")

    def suggest(self, run_name: str, tags: Mapping[str, str]) -> None:
        """Name the run unless the user did, and record the tags with its configuration. Call it before the first use.

        Args:
            run_name: the name.
            tags: names and texts.
        """
        self._wandb_init["name"] = self._wandb_init.get("name") or run_name
        self._wandb_init["config"] = {**tags, **(self._wandb_init.get("config") or {})}

    @override
    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        from wandb.errors import Error

        try:
            _ = self.experiment  # starts the run
        except Error as error:
            raise TrackingError(
                f"wandb does not start the run: {redact_text(str(error))} Log in with `wandb login`, set "
                "WANDB_API_KEY, or write files only (tracking.loggers.wandb.offline=true), for `wandb sync`."
            ) from None
        super().log_hyperparams(redact("", convert_params(params)))

    @rank_zero_only
    def close(self, failed: bool = False) -> None:
        """End the run.

        Args:
            failed: whether wandb shows it as failed.
        """
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(failed))
