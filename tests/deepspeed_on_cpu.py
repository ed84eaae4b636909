"""Imported by fork servers: DeepSpeed, which looks for a GPU as it is imported, and says that it found none.

The variable stays in the server: what it forks has variables of its own.
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed.module_inject.auto_ep_config
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
