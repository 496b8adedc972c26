"""Lint a checkpoint: all findings, each with rule, file, tensor, number and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checkpoint import manifest as manifests
from pipeline.checkpoint import rules_base, rules_config, rules_content, rules_files, rules_sets, rules_stored
from pipeline.checkpoint.declared import Declared
from pipeline.checkpoint.finding import Finding
from pipeline.checkpoint.reading import Checkpoint
from pipeline.checkpoint.table import table_of


def lint(
    directory: Path | str,
    *,
    base: Path | str | None = None,
    manifest: dict[str, Any] | None = None,
    headers_only: bool = False,
) -> list[Finding]:
    """Every finding of a checkpoint directory, sorted, errors before warnings.

    ``base``: the checkpoint that this one was made from, to compare with.  ``manifest``: the files' sizes and hashes,
    to check.  ``headers_only`` reads no tensor bytes (a terabyte takes its time); then NaN, zero and drifted bytes go
    unseen. Raises :class:`Unreadable` when there is no checkpoint to speak of.
    """
    checkpoint = Checkpoint.open(directory)
    findings: list[Finding] = []
    for rule in (rules_files.shards, rules_files.layers, rules_files.head, rules_files.auxiliary):
        findings += rule(checkpoint)
    config: Declared | None = None
    for item in rules_config.configs(checkpoint):
        if isinstance(item, Declared):
            config = item
        else:
            findings.append(item)
    table = table_of(checkpoint, config)
    findings += rules_stored.whole(table)
    if config is not None:
        for rule in (rules_config.matching, rules_stored.stored_as_declared, rules_sets.fused, rules_sets.kv_cache):
            findings += rule(table)
    if not headers_only:
        findings += rules_content.values(table)
        findings += rules_content.global_scales(table)
    if base is not None:
        other = Checkpoint.open(base)
        findings += rules_base.against_base(table, other)
        if not headers_only:
            findings += rules_base.bytes_against_base(table, other)
            findings += rules_base.routers_against_base(table, other)
    if manifest is not None:
        findings += manifests.check(directory, manifest)
    return sorted(set(findings), key=lambda finding: (finding.severity, finding))
