"""`litchi selfcheck`: what this machine was seen to keep, as a JSON answer, for people, and as a page to put aside.

Layouts, equalities and faults in; tables out, with the machine, the versions, the date and the command they are of.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import torch

from litchi.scale import chaos
from litchi.scale.equalities import Equality, check_equalities, format_equalities
from litchi.scale.selfcheck import NORMS, Line, check_layouts, fill_marks, fill_table, format_lines, limit_of
from litchi.train.durable import format_bytes
from litchi.train.resume import versions

SECTIONS = {
    "layouts": ("Every layout against one process", "Largest relative difference of the loss in any of five steps."),
    "equalities": ("What has to be equal", "Largest relative difference; in brackets what is allowed."),
    "faults": ("Faults done to real runs", "Two ranks, the packaged model."),
}


def describe_machine() -> dict[str, Any]:
    """Devices, processor, memory, system and versions."""
    cards = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {
        "device": "cuda" if cards else "cpu",
        "cards": cards,
        "processor": f"{_processor()}, {os.cpu_count()} cores, {format_bytes(psutil.virtual_memory().total)}",
        "system": platform.platform(),
        "versions": versions(),
        "date": str(date.today()),
    }


def _processor() -> str:
    """Its name; the architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def report_equal(most: int, *, quick: bool = False, write: Path | None = None) -> dict[str, Any]:
    """The JSON answer of `selfcheck`; with `write` the table of layouts also goes into a document."""
    machine = describe_machine()
    lines = check_layouts(most, machine["device"], quick=quick, say=lambda text: print(text, file=sys.stderr))
    command = f"litchi selfcheck --procs {most}{' --quick' * quick}"
    where = f"{', '.join(sorted(set(machine['cards']))) or 'CPU, gloo'}, torch {torch.__version__}, {machine['date']}"
    if write is not None:
        text = fill_table(write.read_text(encoding="utf-8"), lines, f"{where}: `{command}`.")
        write.write_text(text, encoding="utf-8")
    equal = check_equalities(quick=quick)
    return {
        "passed": all(line.passed for line in lines) and all(one.passed is not False for one in equal),
        "where": where,
        "command": command,
        "tolerance": {precision: limit_of(precision, machine["device"]) for precision in NORMS},
        "layouts": [asdict(line) for line in lines],
        "equalities": [{**asdict(one), "passed": one.passed} for one in equal],
        "machine": machine,
    }


def report_chaos(*, quick: bool = False, write: Path | None = None) -> dict[str, Any]:
    """The JSON answer of `selfcheck --chaos`; with `write` the scorecard also goes into a document."""
    command = f"litchi selfcheck --chaos{' --quick' * quick}"
    report = {**chaos.report_faults(quick=quick), "command": command, "machine": describe_machine()}
    if write is not None:
        body = f"{report['machine']['date']}: `{command}`.\n\n{chaos.format_report(report)}\n"
        write.write_text(fill_marks(write.read_text(encoding="utf-8"), "faults", body), encoding="utf-8")
    return report


def format_sections(report: Mapping[str, Any]) -> dict[str, str]:
    """The tables of a report, each with its verdict."""
    found = {}
    if "layouts" in report:
        lines = [Line(**line) for line in report["layouts"]]
        bad = sum(not line.passed for line in lines)
        limits = ", ".join(f"{value:.0e} in {name}" for name, value in report["tolerance"].items())
        verdict = f"{bad} of {len(lines)} differ by more than is allowed" if bad else f"all {len(lines)} are within"
        found["layouts"] = f"{format_lines(lines)}\n{verdict} ({limits})"
    if "equalities" in report:
        equal = [Equality(**{k: v for k, v in one.items() if k != "passed"}) for one in report["equalities"]]
        bad = sum(one.passed is False for one in equal)
        verdict = (
            f"{bad} of {len(equal)} are not equal" if bad else f"none of {len(equal)} is further apart than allowed"
        )
        found["equalities"] = f"{format_equalities(equal)}\n{verdict}"
    if "faults" in report:
        bad = sum(one["passed"] is False for one in report["faults"])
        verdict = f"{bad} of {len(report['faults'])} failed" if bad else f"none of {len(report['faults'])} failed"
        found["faults"] = f"{chaos.format_report(report)}\n\n{verdict}"
    return found


def format_report(report: Mapping[str, Any]) -> str:
    """The report for people."""
    return "\n\n".join(format_sections(report).values())


def write_page(path: Path, report: Mapping[str, Any]) -> None:
    """Put a report on a page of what was verified where; what the page has of other commands stays."""
    text = path.read_text(encoding="utf-8") if path.exists() else _new_page()
    machine = report["machine"]
    named = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    cards = machine["cards"]
    gpu = f"{len(cards)} x {cards[0]}" if cards else "**not run on a GPU**"
    where = f"{machine['date']}: `{report['command']}`\n\n{gpu}; {machine['processor']}; {machine['system']}; {named}"
    for name, table in format_sections(report).items():
        text = fill_marks(text, name, f"{where}\n\n{table}\n")
    path.write_text(text, encoding="utf-8")


def _new_page() -> str:
    parts = ["# What was verified where\n"]
    for name, (title, note) in SECTIONS.items():
        parts.append(f"## {title}\n\n{note}\n\n<!-- {name}:begin -->\n\nnot run yet\n\n<!-- {name}:end -->\n")
    return "\n".join(parts)
