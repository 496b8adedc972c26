"""metrics/kv/<variant>.json: how one variant's KV cache is set, and whether its scales are calibrated."""

from pipeline import params, stage, store
from pipeline.checkpoint.reading import Checkpoint
from pipeline.files import read_json, sha256_json, write_json
from pipeline.kv_label import label
from pipeline.variant import Variant


def main(name: str) -> None:
    variant = Variant.parse(name)
    setting = params.load("kv")["dtypes"][variant.kv]
    checkpoint = Checkpoint.open(store.resolve(variant.quant))
    kind, why = label(setting["cache_dtype"], checkpoint.config, checkpoint.weight_map)
    files = read_json(f"metrics/manifests/{variant.quant}.json")["files"]
    write_json(
        f"metrics/kv/{name}.json",
        {"setting": setting, "label": kind, "why": why, "checkpoint_sha256": sha256_json(files)},
    )


if __name__ == "__main__":
    stage.run(main)
