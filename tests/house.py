"""Rules of the package's structure and prose: which folder may import which, and clear sentences.

``python tests/house.py`` lists violations, and exits with 1 if there are any. With ``figures`` it
also prints measures of the package and the files that one partition's call crosses; with ``prose``
it lists unclear docstrings and comments; with ``sample SEED`` it shows 30 random docstrings, to be
explained without their code; with ``write`` it rewrites the map in CONTRIBUTING.md.
"""

import ast
import random
import re
import sys
import threading
import tokenize
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
    {"models"},
    {"tokenizing"},
    {"inference"},
    {"mapping"},
    {"classifiers"},
    {"cluster"},
    {"jobs"},
    {"corpus"},
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
# It only tells what is there, and goes on whatever it finds.
EXCUSED = "commands/doctor.py"

# The rooms in reading order.
ROOMS = (
    "mapping",
    "classifiers",
    "frames",
    "tokenizing",
    "inference",
    "models",
    "hub",
    "settings",
    "workers",
    "jobs",
    "corpus",
    "cluster",
    "commands",
    "curator",
    "pages",
)
# A first sentence with one of these is a paraphrase that the reader has to decode: "what tells the
# files from others" stands for "each file's size and version".
INDIRECT = re.compile(
    r"\b(what|whatever|wherever|whichever|how (many|much|often|far|long|large|likely)"
    r"|(of|in|by|with|for|from|to|at|on) which|(those|that) of|those (that|which|with|who)"
    r"|the (one|ones) (that|of|with)|(so|as) (many|much|often)|from (it|which) on"
    r"|than (those|that))\b",
    re.IGNORECASE,
)
# A comment that begins so continues a sentence that is not there.
FRAGMENT = re.compile(
    r"#\s*(of|in|by|for|with|to|from|at|on|as|that|which|what|where|whose|than|so|behind|beside)\b",
    re.IGNORECASE,
)
# Rooms that run recipes and know none of them, the words that they must not have, and the largest
# count of names of jobs in the modules that declare recipes.
GENERIC = ("jobs", "mapping")
RECIPE_WORDS = re.compile(
    r"dedup|decontam|contaminat|(?<![Ss]core )bucket(?!=)|\bspans\b", re.IGNORECASE
)
RECIPES, MOST_NAMES_OF_JOBS = "corpus/*/job.py", 15
# Folders of the package, and imports between them, at most.
MOST_ROOMS, MOST_ARROWS = 18, 80
# Largest shares of such docstrings and comments. They only fall: dask has 0.006 and 0.042.
MAX_INDIRECT, MAX_FRAGMENTS = 0.002, 0.01
MAX_INDIRECT_OF_A_ROOM = 0.01
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
    found += _circles(arrows) + list(_unsure_answers(root)) + _unclear_prose(root)
    return found + list(_known_recipes(root)) + _wide_recipes(root, arrows) + _drawn(arrows)


def _known_recipes(root: Path) -> Iterator[str]:
    """Yield a line for each word of a recipe in a room that runs any recipe."""
    for room in GENERIC:
        for path in sorted((root / room).rglob("*")):
            # Object stores have buckets, and pages of HTML have spans.
            if path.suffix not in (".py", ".j2") or "stores" in path.parts:
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if (word := RECIPE_WORDS.search(line)) and "<span" not in line:
                    place = f"{path.relative_to(root.parent)}:{number}"
                    yield f"{place}: {room} knows a recipe by its name: {word[0]}"


def _wide_recipes(root: Path, arrows: list[Arrow]) -> list[str]:
    """Return a line if the modules of recipes import more names of jobs than they may."""
    recipes = {_module_name(path, root) for path in root.glob(RECIPES)}
    names = {a.name for a in arrows if a.source in recipes and a.target.startswith("jobs.")}
    if len(names) <= MOST_NAMES_OF_JOBS:
        return []
    return [f"recipes import {len(names)} names of jobs, and {MOST_NAMES_OF_JOBS} may: {names}"]


def _drawn(arrows: list[Arrow]) -> list[str]:
    """Return a line for more rooms, or more imports between rooms, than are drawn."""
    pairs = {(arrow.source.partition(".")[0], arrow.target.partition(".")[0]) for arrow in arrows}
    pairs = {pair for pair in pairs if pair[0] != pair[1]}
    rooms = {room for pair in pairs for room in pair}
    counts = ((len(rooms), MOST_ROOMS, "rooms"), (len(pairs), MOST_ARROWS, "arrows"))
    return [f"{count} {what}, and {most} are drawn" for count, most, what in counts if count > most]


def _unclear_prose(root: Path) -> list[str]:
    """Return a line for each share of unclear prose that is above its limit."""
    found = []
    for kind, limit, (unclear, count) in (
        ("docstrings have to be decoded", MAX_INDIRECT, indirect_docstrings(root)),
        ("comments begin in the middle of a sentence", MAX_FRAGMENTS, comment_fragments(root)),
    ):
        if len(unclear) > limit * count:
            places = "; ".join(unclear[:5])
            found.append(f"{len(unclear)} of {count} {kind}, and {limit:.1%} may: {places}")
    for room in sorted(path for path in root.iterdir() if path.is_dir()):
        unclear, count = indirect_docstrings(room)
        if len(unclear) > max(1, MAX_INDIRECT_OF_A_ROOM * count):
            found.append(f"{room.name}: {len(unclear)} of {count} docstrings have to be decoded")
    return found


def indirect_docstrings(root: Path) -> tuple[list[str], int]:
    """Return the docstrings whose first sentence is `INDIRECT`, and the count of all docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    unclear, count = [], 0
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, documented) and (text := ast.get_docstring(node)):
                paragraph = " ".join(text.split("\n\n")[0].split())
                sentence = re.split(r"(?<=[.:])\s", paragraph)[0]
                count += 1
                if INDIRECT.search(sentence):
                    line = getattr(node, "lineno", 1)
                    unclear.append(f"{path.relative_to(root.parent)}:{line}: {sentence}")
    return unclear, count


def sample_of_docstrings(seed: int = 0, count: int = 30) -> list[str]:
    """Draw random docstrings of the package, each with its file, line, class and signature."""
    found = []
    for path in files(PACKAGE):
        source = path.read_text(encoding="utf-8")
        for owner in ast.walk(ast.parse(source)):
            for node in ast.iter_child_nodes(owner):
                documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
                if isinstance(node, documented) and (text := ast.get_docstring(node)):
                    prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
                    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
                    signature = " ".join(" ".join(lines).split())
                    where = f"{path.relative_to(ROOT)}:{node.lineno}: {prefix}{node.name}"
                    found.append(f"{where}\n{signature}\n{text}")
    return random.Random(seed).sample(found, count)


def comment_fragments(root: Path) -> tuple[list[str], int]:
    """Return the comments that are a `FRAGMENT`, and the count of all comments."""
    unclear, count = [], 0
    for path in sorted(root.rglob("*.py")):
        with tokenize.open(path) as file:
            comments = [
                token
                for token in tokenize.generate_tokens(file.readline)
                if token.type == tokenize.COMMENT
                and not re.match(r"#\s*(type:|noqa|fmt:|!)", token.string)
            ]
        count += len(comments)
        unclear += [
            f"{path.relative_to(root.parent)}:{comment.start[0]}: {comment.string}"
            for comment in comments
            if FRAGMENT.match(comment.string)
        ]
    return unclear, count


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
    for room in ROOMS:
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
    for kind, (unclear, count) in (
        ("docstrings have to be decoded", indirect_docstrings(HOUSE)),
        ("comments begin in the middle of a sentence", comment_fragments(HOUSE)),
    ):
        yield f"{len(unclear) / count:.1%} of {count} {kind}"
    typed, vague = vague_parameters()
    yield f"{vague} of {typed} parameters are Any"
    yield f"{lines([HOUSE / name for name in MATTERS])} lines matter"
    for stage, crossed in way_of_a_partition().items():
        yield f"{stage}: {len(crossed)} files: {' '.join(crossed)}"


def main(verb: str = "", *options: str) -> int:
    """Print violations; measure the package, list unclear prose or write the map if asked to."""
    guide = ROOT / "CONTRIBUTING.md"
    if verb == "write":
        guide.write_text(MAP.sub(lambda _: map_of_the_house(), guide.read_text()))
    if verb == "figures":
        sys.path.insert(0, str(ROOT))
        print(*figures(), sep="\n")
    if verb == "sample":
        print(*sample_of_docstrings(*map(int, options)), sep="\n\n")
    if verb == "prose":
        print(*indirect_docstrings(HOUSE)[0], *comment_fragments(HOUSE)[0], sep="\n")
    found = problems(HOUSE)
    print(*found, f"{len(files(PACKAGE))} files, {len(found)} problems", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
