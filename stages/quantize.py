"""checkpoints/<quant>: the source re-encoded by one recipe, with its manifest and its damage report."""

import os
from pathlib import Path

from pipeline import params, stage, store
from pipeline.files import read_json, write_json
from pipeline.quant.engine import requantize
from pipeline.quant.recipe import Recipe


def main(quant: str) -> None:
    model, settings = params.load("model"), params.load("quant")["schemes"][quant]
    source, recipe = read_json("metrics/source.json"), Recipe.from_params(settings)
    if recipe.format == "native":
        store.point(quant, Path(model["path"]), source)
        report = {"status": "valid", "reason": None, "files": source["files"], "damage": None}
    else:
        pointed = source["size_bytes"] >= model["cache_below_gib"] * store.GIB
        target = (
            store.content_addressed(source["sha256"], recipe.sha256) if pointed else store.tracked(quant)
        )
        workers = len(os.sched_getaffinity(0)) if pointed else 1  # starting a process costs more than a small model
        report = requantize(
            Path(model["path"]), target, recipe, workers=workers, source_manifest=source,
            trust_remote_code=model["trust_remote_code"],
        )  # fmt: skip
        if pointed:
            store.point(quant, target, report)
    write_json(f"metrics/manifests/{quant}.json", {"recipe": settings, "files": report.pop("files")})
    write_json(f"metrics/quantize/{quant}.json", report)


if __name__ == "__main__":
    stage.run(main)
