"""The project modules that a Python file imports, transitively.

Run as a script, it rewrites the deps of dvc.yaml and tuning/dvc.yaml from them.
"""

import ast
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "stages")


def project_file(module: str) -> Path | None:
    """The file of a dotted module name of this project, relative to the repository; None for anybody else's."""
    path = Path(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (REPOSITORY / candidate).is_file():
            return candidate
    return None


def imported_modules(file: Path) -> set[str]:
    """Dotted names that one file imports anywhere in it, functions included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((REPOSITORY / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the full name"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in PACKAGES}


def transitive(file: Path) -> set[Path]:
    """``file`` and every project file that it imports directly or through others (packages' ``__init__`` included)."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        for name in imported_modules(file):
            parts = name.split(".")
            waiting += filter(None, (project_file(".".join(parts[: i + 1])) for i in range(len(parts))))
    return found


def wanted_deps(stage_file: str) -> list[str]:
    """What dvc.yaml must list for a stage besides its data."""
    return sorted(str(path) for path in transitive(Path(stage_file)))


def main() -> None:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width, yaml.preserve_quotes = 140, True
    yaml.indent(mapping=2, sequence=4, offset=2)
    for path in (REPOSITORY / "dvc.yaml", REPOSITORY / "tuning" / "dvc.yaml"):
        document = yaml.load(path)
        for name, stage in document["stages"].items():
            data = [dep for dep in stage["deps"] if not dep.endswith(".py")]
            del stage["deps"][:]
            stage["deps"].extend(wanted_deps(f"stages/{name}.py") + data)
        with path.open("w") as stream:
            yaml.dump(document, stream)


if __name__ == "__main__":
    sys.exit(main())
