"""What a run prints: each line once, and none that a reader cannot use."""

from __future__ import annotations

import logging
import warnings


def tidy_console() -> None:
    """Leave the console to Hydra's handler and to what matters; call it after Lightning was imported.

    Lightning adds a handler of its own beside Hydra's, so that each of its lines appears twice, and its remarks
    hold advertisements. Its warnings stay.
    """
    logging.getLogger("lightning").handlers.clear()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # torch 2.13 deprecates what Lightning 2.6 asks of it; a user can do nothing about it.
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
