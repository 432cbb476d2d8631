"""Commands that end, or whose disk fails, at a change of the file system; and damaged state.

``python tests/faults CASE`` tries every change that a command of `tests.faults.cases` makes, and
every file that it writes, runs the command again, and prints as JSON what came of it.

A fresh process runs it, which has imported all that the command needs and started no thread: every
run of the command is a fork of it. The changes are those that Python makes: an audit hook sees
files being opened for writing, linked, renamed and removed, and folders made and removed; files and
`os.fsync` are wrapped; what libraries write by themselves is in `NATIVE`.
"""

import argparse
import builtins
import contextlib
import errno
import functools
import gc
import importlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

END, END_TWICE, FULL, ERROR, DAMAGE = "end", "end-twice", "full", "error", "damage"
MODES = (END, END_TWICE, FULL, ERROR, DAMAGE)
ENDED = 77
LIMIT_SECONDS = 120  # of a command that takes one
TAKE_SPACE = ("open", "write", "mkdir", "link")
# Functions that write a file by other means than Python's, and which argument is its path.
NATIVE = (("safetensors.numpy", "serialize_file", 1), ("safetensors.torch", "serialize_file", 1))
# What differs between two runs of the same command, and between one and one that starts over.
TIMES = {"sha256", "finished", "worker", "created", "reported", "stats", "totals", "throughput"}
TIMES_END = ("seconds", "_per_second", "_began")
RESTARTED = {"key", "earlier"}
FOREIGN_KEY = "0badf11e"  # of no run
KEY = re.compile(r"(?<![0-9a-f])[0-9a-f]{8}(?![0-9a-f])")
# What a message may tell people to do with a file, if it is not to start over.
GOES = re.compile(r"\bremove\b|move (it|them) away|name (a|another) directory|bring back")
MOST_CURES = 4  # one after another: a message names one of several files


@dataclass
class Outcome:
    """What came of trying a case in one mode; `failures` say which point, and what differs."""

    case: str
    mode: str
    changes: int
    points: int = 0
    healed: int = 0
    refused: int = 0
    leftovers: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ran:
    """A run of a command: its exit code, what it printed, and the changes that it made."""

    code: int
    told: str
    changes: list[list[str]]


class Fault:
    """Counts the changes below a folder, and makes one of them fail."""

    def __init__(self, root: str, mode: str, at: int) -> None:
        self.root, self.mode, self.at = root, mode, at
        self.changes: list[list[str]] = []
        self.report: Callable[[], None] = lambda: None
        self._lock, self._is_failing = threading.RLock(), False

    def change(self, call: str, path: Any, begin: Callable[[], Any] = lambda: None) -> None:
        """Called before a change; `begin` does half of it."""
        shown = self.below(path)
        if shown is None or self._is_failing:
            return
        with self._lock:
            self.changes.append([call, shown])
            number = len(self.changes)
            is_still_full = self.mode == FULL and number > self.at > 0 and call in TAKE_SPACE
            if number != self.at and not is_still_full:
                return
            self._is_failing = True
            begin()
            self._is_failing = False
            if self.mode in (END, END_TWICE):
                self.report()
                os._exit(ENDED)
        number = errno.ENOSPC if self.mode == FULL else errno.EIO
        raise OSError(number, os.strerror(number), str(path))

    def below(self, path: Any) -> str | None:
        """The path in the folder, if it is there; the folder itself is a dot."""
        if isinstance(path, int):
            with contextlib.suppress(OSError):
                path = Path(f"/proc/self/fd/{path}").readlink()
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None
        if isinstance(path, str) and path.startswith("http"):
            return path
        whole = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (follows no links)
        if whole != self.root and not whole.startswith(f"{self.root}/"):
            return None
        return os.path.relpath(whole, self.root)

    def hook(self, event: str, given: tuple[Any, ...]) -> None:
        """Of `sys.addaudithook`."""
        if event == "open":
            path, _, flags = given
            if not isinstance(path, int) and flags & (
                os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
            ):
                self.change("open", path)
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            self.change(event[3:], _in_folder(given[0], given[-1]))
        elif event in ("os.rename", "os.link", "os.symlink"):
            self.change(event[3:], given[1])
        elif event == "os.truncate":
            self.change("truncate", given[0])

    def install(self) -> None:
        """Watch this process from here on."""
        fault, plain_open, plain_sync = self, builtins.open, os.fsync

        class Watched(io.FileIO):
            def write(self, data: Any) -> int:
                half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
                fault.change("write", self.name, functools.partial(super().write, half))
                return super().write(data)

            def truncate(self, *size: Any) -> int:
                fault.change("truncate", self.name)
                return super().truncate(*size)

        def watched_open(  # type: ignore[no-untyped-def]
            file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *rest, **more
        ):
            if not {*mode} & {*"wax+"} or fault.below(file) is None:
                return plain_open(file, mode, buffering, encoding, errors, newline, *rest, **more)
            raw = Watched(file, mode.replace("b", "").replace("t", ""), *rest, **more)
            if buffering == 0:
                return raw
            whole = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return whole if "b" in mode else io.TextIOWrapper(whole, encoding, errors, newline)

        def watched_sync(number: int) -> None:
            fault.change("fsync", number)
            plain_sync(number)

        builtins.open = io.open = watched_open
        os.fsync = watched_sync
        for module, name, place in NATIVE:
            self._watch_native(sys.modules[module], name, place)
        sys.addaudithook(self.hook)

    def _watch_native(self, module: Any, name: str, place: int) -> None:
        plain = getattr(module, name)

        def watched(*given: Any, **more: Any) -> Any:
            path = given[place]

            def begin() -> None:
                plain(*given, **more)
                os.truncate(path, Path(path).stat().st_size // 2)

            self.change("write", path, begin)
            return plain(*given, **more)

        setattr(module, name, watched)


def _in_folder(path: Any, folder: int) -> Any:
    """The path that a call with ``dir_fd`` means; -1 is none."""
    if not isinstance(folder, int) or folder < 0:
        return path
    return Path(f"/proc/self/fd/{folder}").readlink() / os.fsdecode(path)


class World:
    """What a command works on beside its files: nothing."""

    def begin(self) -> None:
        """Called before the command, in its process."""

    def watch(self, fault: Fault) -> None:
        """Called in a process of the command alone: tell of changes there, with their place."""

    def state(self) -> Any:
        """What to compare."""

    def set(self, kept: Any) -> None:
        """Make it as it was when this was kept; None is the beginning."""

    def keep(self) -> Any:
        """What `set` takes."""


@dataclass(frozen=True)
class Case:
    """A command that writes into ``out`` of a folder that `prepare` has filled.

    Attributes
    ----------
    name : str
    words : tuple of str
        Of the command line.
    prepare : callable
        Writes the input into a folder.
    check : callable
        Raises unless the output of an undisturbed run in a folder is right; by other means.
    code : int
        Exit code of an undisturbed run.
    world : World
        What else the command works on.
    """

    name: str
    words: tuple[str, ...]
    prepare: Callable[[Path], None]
    check: Callable[[Path], None]
    code: int = 0
    world: World = field(default_factory=lambda: World())


class Bench:
    """A folder in which a case runs again and again.

    Attributes
    ----------
    changes : list of [call, path]
        Of an undisturbed run.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.out = case, folder, folder / "out"
        self._kept = Path(tempfile.mkdtemp(dir=folder.parent))
        self._worlds: dict[str, Any] = {}
        self._warm_up()
        self.clear()
        ran = self.run()
        self._wanted = self.state()
        self._expect(ran.code == case.code, f"exit code {ran.code}: {ran.told}")
        checked = self._run(functools.partial(case.check, folder))
        self._expect(checked.code == 0, checked.told)
        self.changes = ran.changes
        unseen = {*self._wanted} - {KEY.sub("KEY", path) for _, path in ran.changes} - {"beside"}
        self._expect(not unseen, f"written without being seen: {sorted(unseen)}")
        self.clear()
        self._expect(self.run().code == case.code, "the second run failed")
        self._expect(not (found := self.differences()), f"two runs differ: {found}")
        self.keep("finished")

    def clear(self) -> None:
        """Begin anew."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.case.world.set(None)

    def run(self, mode: str = "", at: int = 0, more: tuple[str, ...] = ()) -> Ran:
        """The command, in a process of its own."""
        return self._run(functools.partial(self._command, [*self.case.words, *more]), mode, at)

    def _command(self, words: list[str]) -> None:
        import dask

        from gpuclassify.commands import client, train
        from gpuclassify.commands.cli import main

        client.open_client = lambda *_: None  # type: ignore[assignment,return-value]
        train.open_client = lambda *_: contextlib.nullcontext()  # type: ignore[attr-defined]
        self.case.world.begin()
        with dask.config.set(scheduler="sync"):
            main(words, prog_name="gpuclassify")

    def _run(self, work: Callable[[], None], mode: str = "", at: int = 0) -> Ran:
        told, report = self.folder / "told", self.folder / "report"
        if (number := os.fork()) == 0:
            self._be_child(work, Fault(str(self.out), mode, at), told, report)
        _, status = os.waitpid(number, 0)
        changes = json.loads(report.read_text()) if report.exists() else []
        report.unlink(missing_ok=True)
        return Ran(os.waitstatus_to_exitcode(status), told.read_text(errors="replace"), changes)

    def _be_child(self, work: Callable[[], None], fault: Fault, told: Path, report: Path) -> None:
        code: Any = 0
        try:
            os.chdir(self.folder)
            signal.alarm(LIMIT_SECONDS)
            number = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(number, 1)
            os.dup2(number, 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
            fault.report = lambda: report.write_text(json.dumps(fault.changes))  # type: ignore
            fault.install()
            self.case.world.watch(fault)
            work()
        except SystemExit as end:
            code = end.code or 0
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 70
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                report.write_text(json.dumps(fault.changes))
            os._exit(code)

    def _warm_up(self) -> None:
        """Run the command here, so that its forks find modules, templates and models."""
        for module, *_ in NATIVE:
            importlib.import_module(module)
        os.chdir(self.folder)
        self.case.prepare(self.folder)
        self.clear()
        told = io.StringIO()
        with (
            contextlib.redirect_stdout(told),
            contextlib.redirect_stderr(told),
            contextlib.suppress(SystemExit),
        ):
            self._command([*self.case.words])
        gc.freeze()  # else collections in forks copy all of it

    def state(self) -> dict[str, Any]:
        """Every file and folder of the output, without what differs between two runs."""
        found: dict[str, Any] = {}
        for path in sorted(self.out.rglob("*")):
            own = path.relative_to(self.out).as_posix()
            if FOREIGN_KEY in own and own.startswith("_gpuclassify/"):
                continue  # what others put into its metadata is none of a job's business
            name = KEY.sub("KEY", own)
            found[name] = "folder" if path.is_dir() else _plain(path)
        found["beside"] = self.case.world.state()
        return found

    def differences(self) -> list[str]:
        """What differs from an undisturbed run."""
        found = self.state()
        names = sorted(
            name for name in {**found, **self._wanted} if found.get(name) != self._wanted.get(name)
        )
        kinds = {(True, False): "left over", (False, True): "gone", (True, True): "another"}
        return [f"{name} is {kinds[name in found, name in self._wanted]}" for name in names]

    def keep(self, name: str) -> None:
        """Keep a copy of the output."""
        shutil.rmtree(self._kept / name, ignore_errors=True)
        shutil.copytree(self.out, self._kept / name)
        self._worlds[name] = self.case.world.keep()

    def bring_back(self, name: str) -> None:
        """Put the copy in the output's place."""
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self._kept / name, self.out)
        self.case.world.set(self._worlds[name])

    @staticmethod
    def _expect(is_so: bool, what: str) -> None:
        if not is_so:
            raise AssertionError(what)


def _plain(path: Path) -> Any:
    """A file's content, without times, speeds and keys."""
    content = path.read_bytes()
    if path.name == "report.html":  # shows times in every place
        return content.rstrip().endswith(b"</html>")
    if path.suffix not in (".json", ".jsonl") and path.name != "_SUCCESS":
        return content
    try:
        return [_timeless(json.loads(each)) for each in _documents(content, path)]
    except ValueError:
        return content


def _documents(content: bytes, path: Path) -> list[bytes]:
    return content.splitlines() if path.suffix == ".jsonl" else [content]


def _is_time(name: str) -> bool:
    return name in TIMES | RESTARTED or name.endswith(TIMES_END)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {KEY.sub("KEY", k): _timeless(v) for k, v in value.items() if not _is_time(k)}
    if isinstance(value, list):
        return [_timeless(each) for each in value]
    return KEY.sub("KEY", value) if isinstance(value, str) else value


def spread(numbers: list[int], most: int | None) -> list[int]:
    """So many of the numbers at most, the first and the last among them, evenly apart."""
    if most is None or len(numbers) <= most:
        return numbers
    step = (len(numbers) - 1) / max(most - 1, 1)
    return sorted({numbers[round(place * step)] for place in range(most)})


def try_changes(bench: Bench, mode: str, most: int | None, at: int | None) -> Outcome:
    """Let a change fail, each in a run of its own, and run the command again."""
    outcome = Outcome(bench.case.name, mode, len(bench.changes))
    numbers = range(1, len(bench.changes) + 1)
    if mode in (FULL, ERROR):
        wanted = TAKE_SPACE if mode == FULL else (*TAKE_SPACE, "fsync", "rename", "remove", "rmdir")
        numbers = [n for n in numbers if bench.changes[n - 1][0] in wanted]  # type: ignore[assignment]
    chance = random.Random(0)
    for number in [at] if at else spread([*numbers], most):
        bench.clear()
        runs = [bench.run(mode, number)]
        if mode == END_TWICE:
            runs.append(bench.run(mode, chance.randrange(1, len(bench.changes))))
        where = f"{mode} at {number}, {' '.join(bench.changes[number - 1])}"
        if mode in (END, END_TWICE) and runs[0].code != ENDED:
            _failed(outcome, f"{where}: did not come to it, exit code {runs[0].code}")
            continue
        runs.append(bench.run())
        _judge(bench, outcome, where, runs)
    return outcome


def _judge(bench: Bench, outcome: Outcome, where: str, runs: list[Ran]) -> None:
    """Count what the last of some runs has made of a fault before it."""
    outcome.points += 1
    found = bench.differences()
    outcome.leftovers += sum(each.endswith("left over") for each in found)
    if runs[-1].code == bench.case.code and not found:
        outcome.healed += 1
        return
    codes = " then ".join(str(each.code) for each in runs)
    told = " ".join(runs[-1].told.split())[-400:] if runs[-1].code != bench.case.code else ""
    outcome.failures.append(f"{where}: exit codes {codes}; {'; '.join(found[:6])} {told}")


def _failed(outcome: Outcome, what: str) -> None:
    outcome.points += 1
    outcome.failures.append(what)


def try_damage(bench: Bench, mode: str, most: int | None, at: int | None) -> Outcome:
    """Damage each file of a finished and of half done outputs, and run the command again."""
    outcome = Outcome(bench.case.name, mode, len(bench.changes))
    states = ["finished"]
    for share in (3, 2):
        number = max(1, len(bench.changes) // share)
        bench.clear()
        bench.run(END, number)
        if bench.out.exists():
            bench.keep(f"ended at {number}")
            states.append(f"ended at {number}")
    tries = [
        (state, name, kind, damage)
        for state in states
        for name, kind, damage in damages(bench, state)
    ]
    numbers = [at] if at else spread([*range(1, len(tries) + 1)], most)
    for number in numbers:
        state, name, kind, damage = tries[number - 1]
        bench.bring_back(state)
        damage(bench.out / name)
        _judge_damage(bench, outcome, f"{number}: {state}, {kind} {name}", bench.out / name)
    return outcome


def _judge_damage(bench: Bench, outcome: Outcome, where: str, path: Path) -> None:
    """Count whether the command heals it, or refuses it and names a cure that helps."""
    ran = bench.run()
    if ran.code == bench.case.code or ran.code not in (1, 2):
        _judge(bench, outcome, where, [ran])
        return
    for _ in range(MOST_CURES):
        if "--restart" in ran.told:
            ran = bench.run(more=("--restart",))
        elif not GOES.search(ran.told) or not _remove_named(bench, ran.told, path):
            break
        else:
            ran = bench.run()
        if ran.code == bench.case.code:
            found = bench.differences()
            outcome.points += 1
            outcome.refused += not found
            if found:
                outcome.failures.append(f"{where}: after its cure {'; '.join(found[:6])}")
            return
    _failed(outcome, f"{where}: exit code {ran.code}, no cure that helps in {ran.told[-600:]}")


def _remove_named(bench: Bench, told: str, damaged: Path) -> bool:
    """Remove the files that a message names; else the damaged one, whose folder it names."""
    words = [word.strip("':,;.") for word in told.split()]
    named = [bench.out / word for word in words if (bench.out / word).is_file()]
    if not named and damaged.is_file():
        named = [damaged]
    for path in named:
        path.unlink()
    return bool(named)


def damages(bench: Bench, state: str) -> Iterator[tuple[str, str, Callable[[Path], None]]]:
    """Name, kind and function of each damage to a kept output."""
    bench.bring_back(state)
    files = [path for path in sorted(bench.out.rglob("*")) if path.is_file()]
    for path in files:
        name, content = path.relative_to(bench.out).as_posix(), path.read_bytes()
        yield name, "removed", Path.unlink
        if content:
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            yield name, "emptied", functools.partial(_write, b"")
            yield name, "cut", functools.partial(_write, content[:middle])
            yield name, "flipped", functools.partial(_write, flipped)
        for kind, edited in _edits(path, content):
            yield name, kind, functools.partial(_write, edited)
        others = [p for p in files if p.parent == path.parent and p.suffix == path.suffix]
        if others[-1] != path:
            other = others[others.index(path) + 1]
            yield name, f"swapped with {other.name} is", functools.partial(_swap, other)
        if path.name.startswith("part-") and KEY.search(path.name):
            for new in _foreign_names(path.name):
                foreign = path.relative_to(bench.out).with_name(new).as_posix()
                yield foreign, "foreign", functools.partial(_write, content)


def _foreign_names(name: str) -> list[str]:
    """Names of files that are not the job's: another number of its own run, and another run's."""
    number = re.compile(r"(?<=part-)\d+")
    return [number.sub("00777", name), KEY.sub(FOREIGN_KEY, name)]


def _edits(path: Path, content: bytes) -> Iterator[tuple[str, bytes]]:
    """A JSON file with another value under one of its names, each in turn."""
    if path.suffix not in (".json", ".jsonl") and path.name != "_SUCCESS":
        return
    try:
        first, *rest = [json.loads(each) for each in _documents(content, path)]
    except ValueError:
        return
    for name, value in first.items() if isinstance(first, dict) else ():
        if not _is_time(name) and (edited := _edited(value)) != value:
            lines = [json.dumps({**first, name: edited}), *map(json.dumps, rest)]
            yield f"edited {name!r} of", "\n".join(lines).encode()


def _edited(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x"
    if isinstance(value, dict) and value:
        name = min(value)
        return {**value, name: _edited(value[name])}
    if isinstance(value, list) and value:
        return [_edited(value[0]), *value[1:]]
    return value


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _swap(other: Path, path: Path) -> None:
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


def try_case(
    case: Case, modes: Sequence[str], most: int | None, at: int | None
) -> Iterator[Outcome]:
    """What comes of a case in each of some modes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "case")
        folder.mkdir()
        bench = Bench(case, folder)
        for mode in modes:
            started = time.perf_counter()
            find = try_damage if mode == DAMAGE else try_changes
            outcome = find(bench, mode, most, at)
            outcome.seconds = round(time.perf_counter() - started, 1)
            yield outcome
        os.chdir("/")


def main() -> None:
    """Try cases in some modes, and print what came of it, a line of JSON for each."""
    from tests.faults.cases import CASES

    parser = argparse.ArgumentParser(prog="python tests/faults", description=__doc__)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=" ".join(CASES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--most", type=int, help="points of a mode, spread over all")
    parser.add_argument("--at", type=int, help="this point alone")
    given = parser.parse_args()
    for name in given.cases:
        for outcome in try_case(CASES[name], given.modes, given.most, given.at):
            sys.stdout.write(f"{json.dumps(asdict(outcome))}\n")
            sys.stdout.flush()
