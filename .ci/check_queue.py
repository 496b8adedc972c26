"""The grid of the README, two experiments of it, through DVC's queue: each in a workspace of its own, all of them complete.

Runs in core, after the whole table: what it needs is in the run cache, so that what is tried is the way, not the arithmetic.
"""

import json
import sys
import time

from command import dvc

GRID = ("-S", "quant=fp8,int8", "-S", "kv=auto")
ROWS = {"metrics/variants/fp8-auto.json", "metrics/variants/int8-auto.json"}
PATIENCE_S = 900


def tasks() -> dict[str, str]:
    """{task: its status} of the queue."""
    lines = [line.split() for line in dvc("queue", "status").stdout.splitlines()]
    return {words[0]: words[-1] for words in lines if words and words[-1] in ("Queued", "Running", "Success", "Failed")}


def variants_of_experiments() -> set[str]:
    """The metrics files of variants that the queued experiments of this commit made."""
    table = json.loads(dvc("exp", "show", "--json", "--hide-workspace").stdout)
    made = set()
    for baseline in table:
        for experiment in baseline.get("experiments") or []:
            for revision in experiment["revs"]:
                rows = (revision.get("data") or {}).get("metrics") or {}
                made |= {path for path, content in rows.items() if (content.get("data") or {}).get("status") == "valid"}
    return made


def main() -> None:
    before = set(tasks())
    dvc("exp", "run", "--queue", *GRID)
    queued = set(tasks()) - before
    if len(queued) != 2:
        sys.exit(f"the grid of two made {len(queued)} tasks: {sorted(queued)}")
    dvc("queue", "start", "-j", "2")
    end = time.monotonic() + PATIENCE_S
    while {status for task, status in tasks().items() if task in queued} & {"Queued", "Running"}:
        if time.monotonic() > end:
            sys.exit(f"after {PATIENCE_S} s the queue is not done: {tasks()}")
        time.sleep(3)
    for task in queued:
        if tasks()[task] != "Success":
            sys.exit(f"experiment {task} is {tasks()[task]}:\n{dvc('queue', 'logs', task).stdout[-6000:]}")
    if missing := ROWS - variants_of_experiments():
        sys.exit(f"the experiments made no valid row for {sorted(missing)}")
    print("two queued experiments ran in workspaces of their own; both rows valid")


if __name__ == "__main__":
    main()
