"""metrics/software.json and metrics/hardware.json: what measures, so that a figure is never taken for another machine's."""

from pathlib import Path

from pipeline import fingerprint, params, stage
from pipeline.plan import hardware


def main() -> None:
    machine = hardware.parse(params.load("hardware"), "params.yaml, hardware")
    fingerprint.write(machine, Path("metrics/software.json"), Path("metrics/hardware.json"))


if __name__ == "__main__":
    stage.run(main)
