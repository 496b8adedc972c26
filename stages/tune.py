"""tuning/ablation.*: one setting at a time around the baseline, and the recommendation against the default in pairs."""

from pathlib import Path

from pipeline import params, stage
from pipeline.errors import Refused
from pipeline.evals.dataset import load
from pipeline.files import read_json
from pipeline.serve import ServerSettings
from pipeline.serving import machine, variant_settings
from pipeline.tuning import report
from pipeline.tuning.measure import Machine
from pipeline.tuning.probe import choose
from pipeline.tuning.run import tune
from pipeline.tuning.settings import read
from pipeline.variant import Variant

FOLDER = Path("tuning")


def main() -> None:
    settings, kv, here = read(FOLDER / "params.yaml"), params.load("kv")["dtypes"], machine()

    def server(quant: str, cache: str) -> ServerSettings:
        if cache not in kv:
            raise Refused(f"kv {cache}: params.yaml has only {', '.join(kv)}; `python3 -m pipeline config kv=all` has more")
        return variant_settings(Variant(quant, cache), kv[cache])

    items = choose(load("data/eval")[0], settings.probe_families, settings.probe_items) if settings.probe_items else []
    result = tune(
        settings,
        Machine(
            server,
            read_json("metrics/hardware.json"),
            read_json("metrics/software.json"),
            here.layout.ranks,
            here.price_usd_per_hour,
            here.platform,
        ),
        items,
        Path(".cache/tuning"),
    )
    report.write(result, FOLDER)
    print(report.markdown(result))


if __name__ == "__main__":
    stage.run(main)
