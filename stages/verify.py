"""metrics/verify/<quant>.json: every lint finding of one checkpoint; an error among them stops the variant here."""

from pathlib import Path

from pipeline import params, stage, store
from pipeline.checkpoint.finding import ERROR
from pipeline.checkpoint.lint import lint
from pipeline.errors import Refused
from pipeline.files import read_json, write_json


def main(quant: str) -> None:
    checkpoint, source = store.resolve(quant), params.load("model")["path"]
    base = None if checkpoint.resolve() == Path(source).resolve() else source
    findings = lint(checkpoint, base=base, manifest=read_json(f"metrics/manifests/{quant}.json"))
    if base is None:  # what else lies beside the source model's files is its owner's business
        findings = [finding for finding in findings if finding.rule != "manifest-extra"]
    errors = [finding for finding in findings if finding.severity == ERROR]
    if errors:
        raise Refused("\n".join([f"{checkpoint}: {len(errors)} errors, not served", *map(str, errors)]))
    write_json(
        f"metrics/verify/{quant}.json",
        {"status": "valid", "reason": None, "warnings": [finding.to_dict() for finding in findings]},
    )


if __name__ == "__main__":
    stage.run(main)
