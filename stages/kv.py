"""metrics/kv/<variant>.json: how one variant's KV cache is set and scaled; data/kv/<variant>: calibrated scales, where it has any.

The last stage before a server, so it also refuses to serve what nobody is on record as having run (``serve.allow_untested``)."""

from pathlib import Path

from pipeline import kv_calibration, params, stage, store
from pipeline.checkpoint.finding import ERROR
from pipeline.checkpoint.lint import lint
from pipeline.checkpoint.reading import Checkpoint
from pipeline.errors import Refused
from pipeline.files import read_json, sha256_json, write_json
from pipeline.k3 import model_facts
from pipeline.kv_calibration import Calibration
from pipeline.kv_label import label
from pipeline.serving import admit
from pipeline.variant import Variant


def main(name: str) -> None:
    variant = Variant.parse(name)
    setting = params.load("kv")["dtypes"][variant.kv]
    calibration = setting.get("calibration")
    admit(variant, read_json(f"metrics/plan/{variant.quant}.json")[variant.kv], **params.load("serve"))
    folder = store.resolve(variant.quant)
    store.clear_overlay(name)
    record = {}
    if calibration:
        record = calibrate(Calibration(**calibration), folder, name)
        folder = store.served(variant.quant, name)
        errors = [finding for finding in lint(folder, headers_only=True) if finding.severity == ERROR]
        if errors:
            raise Refused("\n".join([f"{folder}: {len(errors)} errors with the scales in place", *map(str, errors)]))
    checkpoint = Checkpoint.open(folder)
    kind, why = label(setting["cache_dtype"], checkpoint.config, checkpoint.weight_map)
    files = read_json(f"metrics/manifests/{variant.quant}.json")["files"]
    key = [files, record["scales"]] if record else files
    write_json(
        f"metrics/kv/{name}.json",
        {"setting": setting, "label": kind, "why": why, "checkpoint_sha256": sha256_json(key)} | record,
    )


def calibrate(calibration: Calibration, folder: Path, name: str) -> dict:
    """Calibrate on the source model, store the scales of this variant; what metrics/kv says about them."""
    model = params.load("model")
    source, trusted = Path(model["path"]), model["trust_remote_code"]
    checkpoint = Checkpoint.open(folder)
    facts = model_facts(checkpoint.config)
    if facts.uses_mla:
        raise Refused(f"{folder}: caches a latent, for which the engine reads no k or v scale; use kv fp8 (scale 1.0)")
    documents = kv_calibration.texts(source, calibration, trust_remote_code=trusted)
    scales = kv_calibration.calibrate(source, documents, calibration.tokens, trust_remote_code=trusted)
    if len(scales) != 2 * len(facts.kv_layers):
        raise Refused(f"{source}: {len(scales)} scales for {len(facts.kv_layers)} layers that cache keys and values")
    store.write_overlay(name, checkpoint, kv_calibration.with_scheme(checkpoint.config), scales)
    return {"scales": scales, "documents_sha256": sha256_json(documents)}


if __name__ == "__main__":
    stage.run(main)
