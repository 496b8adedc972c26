"""tuning/ablation.*: one setting at a time around the baseline, and the recommendation against the default in pairs."""

from pathlib import Path

from pipeline import params, stage, store
from pipeline.evals.dataset import load
from pipeline.files import read_json
from pipeline.plan import hardware
from pipeline.serving import server_settings
from pipeline.tuning import report
from pipeline.tuning.measure import Machine
from pipeline.tuning.probe import choose
from pipeline.tuning.run import tune
from pipeline.tuning.settings import TuningSettings

FOLDER = Path("tuning")


def main() -> None:
    settings = TuningSettings.from_params(params.load("tuning", FOLDER / "params.yaml"))
    model, kv = params.load("model"), params.load("kv")["dtypes"]
    machine = hardware.parse(params.load("hardware"), "params.yaml, hardware")

    def server(quant: str, cache: str):
        return server_settings(
            machine, model["name"], store.resolve(quant), kv[cache], trust_remote_code=model["trust_remote_code"]
        )

    items = choose(load("data/eval")[0], settings.probe_families, settings.probe_items) if settings.probe_items else []
    result = tune(
        settings,
        Machine(
            server,
            read_json("metrics/hardware.json"),
            read_json("metrics/software.json"),
            machine.layout.ranks,
            machine.price_usd_per_hour,
            machine.platform,
        ),
        items,
        Path(".cache/tuning"),
    )
    report.write(result, FOLDER)
    print(report.markdown(result))


if __name__ == "__main__":
    stage.run(main)
