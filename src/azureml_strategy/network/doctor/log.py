"""Explains an NCCL log in a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from azureml_strategy.network.doctor.report import Report, Section, without_secrets
from azureml_strategy.network.findings import Finding, Verdict
from azureml_strategy.network.infiniband import read_hcas
from azureml_strategy.network.nccl_log import Transport, describe, read_transport
from azureml_strategy.network.nccl_log.transport import some_of

_VERDICTS: Mapping[str, Verdict] = {"problem": "problem", "warning": "warning", "info": "ok"}
_EVIDENCE = {
    "channels": "channel lines, which show the traffic itself",
    "collnet": "channel lines of SHARP",
    "init": "what NCCL selected at its start; no channel line shows traffic",
    "error": "an error only",
    "none": "nothing: no line shows a network",
}
_SHARP = {
    "used": "used: the switches reduce",
    "failed": "tried, and not available",
    "available": "offered by the adapters, not used",
}
_SET_DEBUG = "Run again with NCCL_DEBUG=INFO set on every rank, and give the log of that run."


class UnreadableLog(ValueError):  # noqa: N818 - reads as what happened
    """The file cannot be opened or read; the message says why."""


def explain_log(name: str, root: str | Path = "/", environ: Mapping[str, str] | None = None) -> Report:
    """Explain what an NCCL log shows: the transport, the evidence for it, and each error with its fix.

    The report compares the log with this machine's adapters, below the folder `root` that holds `sys` and `dev`. It
    leaves out the secrets of the variables, by default those of this process.

    Args:
        name: path of the log; `-` reads standard input.

    Raises:
        UnreadableLog: the file cannot be read.
    """
    try:
        transport = read_transport(sys.stdin.buffer if name == "-" else Path(name))
    except OSError as error:
        raise UnreadableLog(
            f"The log {name} cannot be read: {error.strerror}. Give the path of a file, or - for standard input."
        ) from error
    messages = []
    for found in (*transport.errors, *transport.findings):
        times = f" ({found.count} times)" if found.count > 1 else ""
        text = f'"{found.text}"{times} {found.explanation}'
        messages.append(Finding(_VERDICTS[found.severity], found.name, text, found.fix))
    sections = (
        Section("Transport", (*_transport(transport), *_machine(transport, Path(root)))),
        Section("Messages", tuple(messages)),
    )
    report = Report(tuple(section for section in sections if section.findings), {"transport": asdict(transport)})
    return without_secrets(report, os.environ if environ is None else environ)


def _transport(transport: Transport) -> Iterator[Finding]:
    seen = transport.hosts or transport.nccl_version or transport.errors
    if transport.evidence == "none" and not seen:
        yield Finding("problem", "transport", "this is no log of NCCL: not one of its lines is in it.", _SET_DEBUG)
        return
    if transport.kind == "unknown":
        yield Finding("warning", "transport", "the log has lines of NCCL, but none that shows it.", _SET_DEBUG)
    else:
        verdict: Verdict = "problem" if transport.evidence == "error" else "ok"
        yield Finding(verdict, "transport", describe(transport))
    for subject, text in _details(transport):
        yield Finding("ok", subject, text)


def _details(transport: Transport) -> Iterator[tuple[str, str]]:
    over_network, inside = transport.network_channels, transport.local_channels
    channels = f": {over_network:,} over a network, {inside:,} inside nodes" if over_network or inside else ""
    yield "evidence", _EVIDENCE[transport.evidence] + channels
    if transport.nccl_version or transport.plugin:
        plugin = f", plugin {transport.plugin}" if transport.plugin else ""
        yield "library", f"{transport.library.upper()} {transport.nccl_version or 'of unknown version'}{plugin}"
    if transport.hosts:
        ranks = f", {transport.ranks} ranks" if transport.ranks else ""
        yield "hosts", f"{len(transport.hosts)}: {some_of(transport.hosts)}{ranks}"
    if transport.hcas:
        yield "adapters", some_of(transport.hcas)
    if transport.other_devices:
        yield "other adapters", some_of(transport.other_devices)
    if transport.kind in ("ib", "roce", "ofi"):
        yield "GPUDirect RDMA", {True: "used", False: "not used", None: "the log does not show it"}[transport.gpudirect]
    if transport.relaxed_ordering is not None:
        yield "relaxed ordering", "on" if transport.relaxed_ordering else "off, which slows GPUDirect RDMA in a VM"
    if transport.interfaces:
        yield "interface", some_of(transport.interfaces)
    if transport.intra_node:
        yield "inside nodes", transport.intra_node
    if transport.sharp:
        yield "SHARP", _SHARP[transport.sharp]
    if transport.pxn:
        yield "PXN", "used: a GPU passes data on to the adapter of another"


def _machine(transport: Transport, root: Path) -> Iterator[Finding]:
    """Warn if this machine has usable InfiniBand that the log does not use."""
    usable = [hca.name for hca in read_hcas(root / "sys", root / "dev") if hca.usable]
    if usable and transport.kind in ("socket", "roce"):
        yield Finding(
            "warning",
            "this machine",
            f"it has {len(usable)} usable InfiniBand port(s) ({some_of(usable)}), which the log does without. If the "
            "log is of this job, InfiniBand was there and not used.",
            "Run `azureml-strategy doctor` here: it names the settings that keep NCCL from it.",
        )
