"""Lint a checkpoint: all findings, each with rule, file, tensor, number and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint import manifest as manifests
from pipeline.checkpoint import rules_content, rules_files, rules_scheme
from pipeline.checkpoint.declared import Declared
from pipeline.checkpoint.finding import Finding
from pipeline.checkpoint.reading import Checkpoint


def lint(
    directory: Path | str,
    *,
    base: Path | str | None = None,
    manifest: dict[str, Any] | None = None,
    headers_only: bool = False,
) -> list[Finding]:
    """Every finding of a checkpoint directory, sorted, errors before warnings.

    ``base``: the checkpoint that this one was made from, to compare with.  ``manifest``: the files' sizes and hashes, to
    check.  ``headers_only`` reads no tensor bytes (a terabyte takes its time); then NaN, zero and drifted bytes go unseen.
    Raises :class:`Unreadable` when there is no checkpoint to speak of.
    """
    checkpoint = Checkpoint.open(directory)
    findings = [*rules_files.shards(checkpoint), *rules_files.layers(checkpoint), *rules_files.auxiliary(checkpoint)]
    config: Declared | None = None
    for item in rules_scheme.configs(checkpoint):
        if isinstance(item, Declared):
            config = item
        else:
            findings.append(item)
    table = rules_scheme.table_of(checkpoint, config)
    if config is not None:
        for rule in (rules_scheme.matching, rules_scheme.stored_as_declared, rules_scheme.fused, rules_scheme.kv_cache):
            findings += rule(table)
    if not headers_only:
        findings += rules_content.values(table)
        findings += rules_content.global_scales(table)
    if base is not None:
        other = Checkpoint.open(base)
        findings += rules_content.against_base(table, other)
        if not headers_only:
            findings += rules_content.bytes_against_base(table, other)
    if manifest is not None:
        findings += manifests.check(directory, manifest)
    return sorted(set(findings), key=lambda finding: (finding.severity, finding))
