"""Which file of the package imports which, held against the layers that are declared here.

Run as ``python tests/layers.py``: lists what breaks a rule, and ends with 1 if anything does.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PACKAGE = "gpuclassify"
# From low to high. A file imports its own layer and lower ones.
LAYERS = (
    {"_version", "settings", "pages", "workers"},
    {"hub", "frames"},
    {"models"},
    {"tokenizing"},
    {"inference"},
    {"mapping"},
    {"fasttext", "questions"},
    {"classifiers"},
    {"dedup"},
    {"scores", "training"},
    {"cluster", "testing"},
    {"jobs"},
    {"demo", "curator"},
    {"commands"},
    {"__main__"},
)
# What the order alone would allow: the rooms that each of these must not import.
FORBIDDEN = {
    "inference": {"frames"},  # it knows arrays, no dataframe
    "cluster": {*set().union(*LAYERS[1:]) - {"cluster"}},  # what it checks there is handed in
}


class Arrow(NamedTuple):
    """Where an import stands, the importing module, the imported one, and the name as written."""

    place: str
    source: str
    target: str
    name: str


def read_arrows(root: Path) -> tuple[set[str], list[Arrow]]:
    """All modules of the package below `root`, and every import of one by another.

    Imports inside functions and under TYPE_CHECKING count. The package itself is the module "".
    """
    paths = {_module_name(path, root): path for path in sorted(root.rglob("*.py"))}
    arrows = []
    for source, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _imported_names(node):
                target = name
                while target not in paths:  # a name in a module: the module that holds it
                    target = target.rpartition(".")[0]
                if target != source:
                    place = f"{path.relative_to(root.parent)}:{node.lineno}"
                    arrows.append(Arrow(place, source, target, name))
    return set(paths), arrows


def _module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(node: ast.AST) -> Iterator[str]:
    """Dotted names below the package that a statement imports."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:  # ruff bans relative imports
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        names = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    for name in names:
        package, _, rest = name.partition(".")
        if package == PACKAGE:
            yield rest


def problems(root: Path) -> list[str]:
    """What breaks a rule, one line each; empty if nothing does."""
    modules, arrows = read_arrows(root)
    heights = {room: height for height, layer in enumerate(LAYERS) for room in layer}
    heights[""] = len(LAYERS)  # the package's face stands above all
    found = [
        f"{module}: in no layer; add it to LAYERS in tests/layers.py"
        for module in sorted(modules)
        if module.partition(".")[0] not in heights
    ]
    for arrow in arrows:
        here, there = (name.partition(".")[0] for name in (arrow.source, arrow.target))
        if not arrow.target:
            found.append(f"{arrow.place}: imports {arrow.name or PACKAGE} from the face")
        elif heights.get(there, -1) > heights.get(here, len(LAYERS)):
            found.append(f"{arrow.place}: {here} imports {arrow.name}, which is in a higher layer")
        elif there in FORBIDDEN.get(here, ()):
            found.append(f"{arrow.place}: {here} must not import {arrow.name}")
    return found + _circles(arrows)


def _circles(arrows: list[Arrow]) -> list[str]:
    """One line for each circle, found by taking its last arrow away before the next is sought."""
    places = {(arrow.source, arrow.target): arrow.place for arrow in arrows if arrow.target}
    found = []
    while True:
        graph: dict[str, list[str]] = {}
        for source, target in places:
            graph.setdefault(source, []).append(target)
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as err:
            circle = err.args[1][::-1]
            steps = list(pairwise(circle))
            shown = "; ".join(f"{places[step]} imports {step[1]}" for step in steps)
            found.append(f"circle {' -> '.join(circle)}: {shown}")
            del places[steps[-1]]
        else:
            return found


def main() -> int:
    """Print problems and figures of this checkout's package."""
    root = Path(__file__).parents[1] / PACKAGE
    modules, arrows = read_arrows(root)
    found = problems(root)
    print(*found, sep="\n" if found else "")
    rooms = {module.partition(".")[0] for module in modules}
    pairs = {(arrow.source, arrow.target) for arrow in arrows}
    print(f"{len(modules)} files in {len(rooms)} rooms, {len(pairs)} arrows, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
