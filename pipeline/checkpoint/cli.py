"""``python3 -m pipeline verify DIR``: lint a checkpoint, ours or a stranger's."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from pipeline import files
from pipeline.checkpoint import declared
from pipeline.checkpoint.finding import ERROR
from pipeline.checkpoint.lint import lint
from pipeline.checkpoint.manifest import entries
from pipeline.checkpoint.reading import CONFIG
from pipeline.errors import EXIT_GOOD, EXIT_REFUSED, EXIT_UNREADABLE, PipelineError, Unreadable


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python3 -m pipeline verify",
        description="List everything that is wrong with a checkpoint. Exit code 0: no errors; 3: findings; "
        "6: cannot read it.",
    )
    made.add_argument("directory", help="the checkpoint")
    made.add_argument(
        "--base", help="the checkpoint it was made from: compare names, dtypes, bytes and auxiliary files"
    )
    made.add_argument("--hashes", metavar="MANIFEST", help="check every file's size and SHA-256 against this manifest")
    made.add_argument("--headers-only", action="store_true", help="read no tensor bytes")
    made.add_argument("--strict", action="store_true", help="warnings count as findings")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def main(argv: list[str]) -> int:
    """Run the lint; returns 0, 3 or 6."""
    arguments = parser().parse_args(argv)
    directory = Path(arguments.directory)
    try:
        manifest = files.read_json(arguments.hashes) if arguments.hashes else None
        if manifest is not None:
            _check_manifest(arguments.hashes, manifest)
        findings = lint(directory, base=arguments.base, manifest=manifest, headers_only=arguments.headers_only)
        configs = [path for path, _ in declared.find_configs(files.read_json(directory / CONFIG))]
    except (PipelineError, OSError) as error:  # OSError: a file that may not be read, a disk that fails
        if arguments.json:
            print(json.dumps({"status": "invalid", "reason": str(error), "findings": []}))
        print(f"verify: {_printable(str(error))}", file=sys.stderr)
        return EXIT_UNREADABLE
    errors = [finding for finding in findings if finding.severity == ERROR or arguments.strict]
    warnings = len(findings) - len(errors)
    if arguments.json:
        result = {
            "status": "valid",
            "reason": None,
            "clean": not errors,
            "quantization_configs": configs,
            "errors": len(errors),
            "warnings": warnings,
            "rules": dict(Counter(finding.rule for finding in findings)),
            "findings": [finding.to_dict() for finding in findings],
        }
        print(_printable(json.dumps(result, indent=2, ensure_ascii=False)))
    else:
        for finding in findings:
            print(_printable(str(finding)))
        print(_printable(f"{CONFIG} declares quantization at {', '.join(configs) or 'no place'}"))
        print(f"{arguments.directory}: {len(errors)} errors, {warnings} warnings")
    return EXIT_REFUSED if errors else EXIT_GOOD


def _printable(text: str) -> str:
    """Names from files may hold what no terminal takes (lone surrogates); they are told escaped."""
    return text.encode(errors="backslashreplace").decode()


def _check_manifest(path: str, manifest: object) -> None:
    try:
        entries(manifest)
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from None
