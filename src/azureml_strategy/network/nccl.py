"""Which settings NCCL (on AMD GPUs RCCL, which reads the same variables) needs on this node, and why."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from azureml_strategy.network.configured import PLANNED_VARIABLES, configured_settings, planned_earlier
from azureml_strategy.network.conflicts import find_conflicts
from azureml_strategy.network.findings import Finding
from azureml_strategy.network.hardware import find_faults
from azureml_strategy.network.log_file import log_settings
from azureml_strategy.network.node import Node, read_node
from azureml_strategy.network.settings import Setting, wanted_settings


@dataclass(frozen=True)
class NetworkPlan:
    """Settings for one node, with the findings that led to them.

    Attributes:
        settings: what is to be set; variables that somebody has set already are not among them.
        kept: variables about communication that the user or the machine has set; their values win.
        findings: hardware that does not work as it should, and values that contradict the hardware.
        infiniband: whether NCCL has InfiniBand to use, by the hardware and by these settings.
    """

    settings: tuple[Setting, ...]
    kept: tuple[Setting, ...]
    findings: tuple[Finding, ...]
    infiniband: bool

    @property
    def variables(self) -> dict[str, str]:
        """What is to be set: name and value."""
        return {setting.variable: setting.value for setting in self.settings}

    @property
    def effective(self) -> dict[str, str]:
        """What holds once the plan is applied: name and value."""
        return {setting.variable: setting.value for setting in (*self.kept, *self.settings)}

    def for_gloo(self) -> NetworkPlan:
        """The part that concerns gloo; InfiniBand is nothing to it."""
        settings = tuple(setting for setting in self.settings if setting.variable.startswith("GLOO_"))
        kept = tuple(setting for setting in self.kept if setting.variable.startswith("GLOO_"))
        findings = tuple(finding for finding in self.findings if finding.subject.startswith("GLOO_"))
        return NetworkPlan(settings, kept, findings, infiniband=False)

    def including(self, settings: Iterable[Setting]) -> NetworkPlan:
        """The same plan, with more settings."""
        return replace(self, settings=(*self.settings, *settings))

    def without(self, variable: str) -> NetworkPlan:
        """The same plan, which leaves a variable as it is."""
        return replace(self, settings=tuple(each for each in self.settings if each.variable != variable))

    def apply(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Set the variables, and note them, so that a later plan does not take them for the user's.

        Args:
            environ: that of this process by default.
        """
        environ = os.environ if environ is None else environ
        if not self.settings:
            return
        environ[PLANNED_VARIABLES] = json.dumps(planned_earlier(environ) | self.variables)
        environ.update(self.variables)


def plan_nccl(
    node: Node | None = None,
    *,
    num_nodes: int = 1,
    log_folder: Path | None = None,
    environ: Mapping[str, str] | None = None,
    root: str | Path = "/",
) -> NetworkPlan:
    """Plan the settings for a node; nothing is changed until the plan is applied.

    A value that the user has set, in the environment or in a file that NCCL reads, wins always. Where it contradicts
    the hardware, a finding says what that costs.

    Args:
        node: the node's facts; read from this machine by default.
        num_nodes: nodes of the job.
        log_folder: where NCCL is to write its log, so that the transport can be read back; None leaves the log alone.
        environ: the environment of the process; this one's by default.
        root: the folder that holds `etc`, where NCCL's configuration file is.
    """
    node = read_node(root, environ) if node is None else node
    library = "rccl" if node.gpus.vendor == "amd" else "nccl"
    configured = configured_settings(environ, root=root, library=library)
    wanted = [*wanted_settings(node, num_nodes), *(log_settings(configured, log_folder) if log_folder else ())]
    if "NCCL_IB_HCA" in configured:  # whoever names an adapter wants it, be it RoCE
        wanted = [setting for setting in wanted if setting.variable != "NCCL_IB_DISABLE"]
    conflicts = tuple(find_conflicts(node, configured, num_nodes))
    return NetworkPlan(
        settings=tuple(setting for setting in wanted if setting.variable not in configured),
        kept=tuple(Setting(name, value, "set already", source) for name, (value, source) in configured.items()),
        findings=(*find_faults(node), *conflicts),
        infiniband=bool(node.usable_hcas) and not any(map(_switches_infiniband_off, conflicts)),
    )


def _switches_infiniband_off(conflict: Finding) -> bool:
    return conflict.verdict == "problem" and conflict.subject.startswith("NCCL_")
