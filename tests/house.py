"""The house: which room may import which, how heavy it is, and the files that a reader follows.

``python tests/house.py`` lists what breaks a rule, and ends with 1 if anything does; with
``figures`` it prints the measures of the whole, and the files that a partition's way crosses, with
``write`` it writes the map of CONTRIBUTING.md anew.
"""

import ast
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

PACKAGE = "gpuclassify"
ROOT = Path(__file__).parents[1]
HOUSE = ROOT / PACKAGE
# From low to high. A file imports its own layer and lower ones.
LAYERS = (
    {"_version", "settings", "pages", "workers"},
    {"hub", "frames"},
    {"models", "stores"},
    {"tokenizing"},
    {"inference"},
    {"mapping"},
    {"fasttext", "questions", "spans"},
    {"classifiers"},
    {"cluster"},
    {"jobs"},
    {"decontamination", "dedup", "scores", "training"},
    {"curator"},
    {"commands"},
    {"__main__"},
)
# What the order alone would allow: the rooms that each of these must not import.
FORBIDDEN = {
    "inference": {"frames"},  # it knows arrays, no dataframe
    "cluster": {*set().union(*LAYERS[1:]) - {"cluster"}},  # what it checks there is handed in
}

# They call absent what they may not look at; `settings/paths.py` and `Store.has` do not.
UNSURE = ("exists", "is_file", "is_dir")
VAGUE = ("own", "found", "given", "told")  # names that say nothing of what they hold
# It only tells what is there, and goes on whatever it finds.
EXCUSED = "commands/doctor.py"

# The rooms as a reader takes them, and the lines that each may have: a commit that needs more
# raises the budget and says why, and one that leaves a whole hundred free lowers it.
BUDGETS = {
    "mapping": 4300,
    "classifiers": 2100,
    "frames": 700,
    "tokenizing": 2000,
    "inference": 4100,
    "models": 2800,
    "questions": 4300,
    "spans": 1300,
    "fasttext": 900,
    "hub": 1300,
    "settings": 1300,
    "workers": 1100,
    "stores": 1400,
    "jobs": 9100,
    "dedup": 3400,
    "decontamination": 1800,
    "scores": 3300,
    "training": 2300,
    "cluster": 2300,
    "commands": 4400,
    "curator": 1000,
    "pages": 200,
}
# The lines that matter, in the order in which a partition crosses them.
MATTERS = (
    "mapping/partition_map.py",
    "mapping/text_mapper.py",
    "frames/pandas.py",
    "mapping/runners.py",
    "tokenizing/prefetch.py",
    "inference/engine.py",
    "inference/batching.py",
    "mapping/heads.py",
    "inference/residency.py",
)
MAP = re.compile(r"(?<=In reading order:\n\n).*?(?=\n\n`python tests/house.py write`)", re.DOTALL)


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
        f"{module}: in no layer; add it to LAYERS in tests/house.py"
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
    checks = (_over_budget, _unsure_answers, _riddles)
    return found + _circles(arrows) + [line for check in checks for line in check(root)]


def _over_budget(root: Path) -> Iterator[str]:
    """Yield a line for each room that has more lines than its budget."""
    for room, budget in BUDGETS.items():
        count = lines(sorted((root / room).rglob("*.py")))
        if count > budget:
            yield (
                f"{room}/: {count} lines, and its budget is {budget}: make it smaller, or raise "
                "BUDGETS in tests/house.py and say why in the commit"
            )


def _riddles(root: Path) -> Iterator[str]:
    """One line for each docstring that says what something is by another question."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, documented) and (ast.get_docstring(node) or "").startswith("What "):
                place = f"{path.relative_to(root.parent)}:{getattr(node, 'lineno', 1)}"
                yield f'{place}: begin with a verb, or with the noun that it is, not with "What"'


def _unsure_answers(root: Path) -> Iterator[str]:
    """One line for each call of a method that says no also where it cannot know."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in UNSURE
                and path != root / EXCUSED
            ):
                place = f"{path.relative_to(root.parent)}:{node.lineno}"
                yield f"{place}: {node.func.attr} takes a missing permission for an absence"


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


def files(*folders: str) -> list[Path]:
    """The Python files below folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def lines(paths: list[Path]) -> int:
    """How many lines files have."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def arrows_between_rooms() -> tuple[set[str], set[tuple[str, str]]]:
    """The package's folders and root files, and which imports which."""
    modules, arrows = read_arrows(HOUSE)
    pairs = {(arrow.source.partition(".")[0], arrow.target.partition(".")[0]) for arrow in arrows}
    return {module.partition(".")[0] for module in modules}, {
        (source, target) for source, target in pairs if source != target
    }


def floors() -> int:
    """How many rooms the longest way down has."""
    _, arrows = arrows_between_rooms()

    @cache
    def height(room: str) -> int:
        return 1 + max((height(below) for above, below in arrows if above == room), default=0)

    return max(height(above) for above, _ in arrows)


def private_functions() -> tuple[int, int]:
    """How many functions have a name with an underscore, and how many of them one caller."""
    defined: Counter[str] = Counter()
    named: Counter[str] = Counter()
    for path in files(PACKAGE):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and re.match(r"_[^_]", node.name):
                defined[node.name] += 1
            elif isinstance(node, ast.Name):
                named[node.id] += 1
            elif isinstance(node, ast.Attribute):
                named[node.attr] += 1
    # A name that stands in several files has as many callers as it is named, shared between them.
    once = sum(count for name, count in defined.items() if named[name] <= count)
    return defined.total(), once


def way_of_a_partition() -> dict[str, list[str]]:
    """Files of the package whose functions run: at the constructor, the lazy call, and so on."""
    import dask
    import dask.dataframe as dd
    import pandas as pd
    import torch  # noqa: F401 - loaded before its cost is anyone's

    from gpuclassify import DomainClassifier
    from tests.replicas import sample_texts, write_checkpoint

    way: dict[str, list[str]] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            name = frame.f_code.co_filename
            if name.startswith(f"{HOUSE}/") and (file := name[len(f"{HOUSE}/") :]) not in here:
                here.append(file)

    def follow(stage: str, call: Callable[[], Any]) -> Any:
        nonlocal here
        here = way[stage] = []
        return call()

    here: list[str] = []
    frame = pd.DataFrame({"text": sample_texts(40, seed=0)})
    with TemporaryDirectory() as folder, dask.config.set(scheduler="synchronous"):
        model = write_checkpoint(Path(folder) / "model", "domain")
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            classifier = follow("constructor", lambda: DomainClassifier(model=str(model)))
            parts = dd.from_pandas(frame, npartitions=3)
            lazy = follow("lazy call", lambda: classifier(parts))
            follow("first compute", lazy.partitions[0].compute)
            tasks = lazy.to_delayed()
            follow("second compute", tasks[1].compute)
            follow("a partition, steadily", tasks[2].compute)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    del way["second compute"]
    return way


def vague_parameters() -> tuple[int, int]:
    """How many parameters have a type, and how many of them `Any`; ``*`` and ``**`` left out."""
    types = [
        ast.unparse(parameter.annotation)
        for path in files(PACKAGE)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if parameter.annotation is not None
    ]
    return len(types), types.count("Any")


def map_of_the_house() -> str:
    """The rooms in reading order, each with its lines and the sentence of its ``__init__``."""
    rows = ["| room | lines | what it is |", "|---|---|---|"]
    for room in BUDGETS:
        said = ast.get_docstring(ast.parse((HOUSE / room / "__init__.py").read_text())) or ""
        sentence = " ".join(said.split("\n\n")[0].split()).removesuffix(".")
        rows.append(f"| `{room}/` | {_rounded(HOUSE / room)} | {sentence} |")
    rows += [
        "",
        f"The {_rounded(*(HOUSE / name for name in MATTERS))} lines that matter, in order:",
    ]
    rows += [
        "",
        *(f"{i}. `{name}` ({_rounded(HOUSE / name)})" for i, name in enumerate(MATTERS, 1)),
    ]
    return "\n".join(rows)


def _rounded(*places: Path) -> int:
    found = (place.rglob("*.py") if place.is_dir() else [place] for place in places)
    return max(round(sum(lines(list(paths)) for paths in found), -2), 10)


def figures() -> Iterator[str]:
    """The measures of the whole, a line each; then the files of each stage of a partition's way."""
    rooms, arrows = arrows_between_rooms()
    private, once = private_functions()
    yield f"{len(rooms)} rooms, {len(arrows)} arrows, {floors()} floors"
    yield f"{len([*HOUSE.glob('*.py'), HOUSE / 'py.typed'])} files at the root"
    for folder in (PACKAGE, "tests", "benchmarks", "examples"):
        yield f"{folder}: {lines(files(folder))} lines in {len(files(folder))} files"
    yield f"{once} of {private} private functions have one caller"
    content = "\n".join(path.read_text(encoding="utf-8") for path in files(PACKAGE))
    words = Counter(re.findall(r"\w+", content))
    counts = (f"{word} {words[word]}" for word in VAGUE)
    yield f"words that say little: {', '.join(counts)}"
    typed, vague = vague_parameters()
    yield f"{vague} of {typed} parameters are Any"
    yield f"{lines([HOUSE / name for name in MATTERS])} lines matter"
    for stage, crossed in way_of_a_partition().items():
        yield f"{stage}: {len(crossed)} files: {' '.join(crossed)}"


def main(verb: str = "") -> int:
    """Print what breaks a rule; measure or write if told to."""
    guide = ROOT / "CONTRIBUTING.md"
    if verb == "write":
        guide.write_text(MAP.sub(lambda _: map_of_the_house(), guide.read_text()))
    if verb == "figures":
        sys.path.insert(0, str(ROOT))
        print(*figures(), sep="\n")
    found = problems(HOUSE)
    print(*found, f"{len(files(PACKAGE))} files, {len(found)} problems", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
