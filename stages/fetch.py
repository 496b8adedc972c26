"""metrics/source.json: which files the source model consists of.  Downloads only what is missing.

The first stage of every run, so it also checks all of params.yaml: a misspelt key stops here, not after an evaluation.
"""

from pathlib import Path

from pipeline import config, params, source, stage
from pipeline.errors import Unreadable
from pipeline.files import sha256_json, write_json


def main() -> None:
    config.check(params.read())
    model = params.load("model")
    folder = Path(model["path"])
    if missing := source.missing_shards(folder):
        if not model["repo"]:
            raise Unreadable(f"{folder}: {len(missing)} files are missing, first {missing[0]}, and model.repo names no hub id")
        source.download(model["repo"], model["revision"], folder, trust_remote_code=model["trust_remote_code"])
        if missing := source.missing_shards(folder):
            raise Unreadable(f"{folder}: still lacks {', '.join(missing[:5])} after downloading {model['repo']}")
    files = source.manifest(folder)
    write_json(
        "metrics/source.json",
        {
            "model": model["name"],
            "repo": model["repo"],
            "commit": source.downloaded_commit(folder),
            "size_bytes": sum(entry["size_bytes"] for entry in files),
            "sha256": sha256_json(files),
            "files": files,
        },
    )


if __name__ == "__main__":
    stage.run(main)
