"""Messages name the library's arguments; the command line makes them its options."""

import ast
import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import gpuclassify
from gpuclassify import AnnotationWriter, JsonlWriter, Pipeline, read_files
from gpuclassify.commands.cli import main
from gpuclassify.commands.console import with_options
from gpuclassify.jobs.input.readers import FileReader

PACKAGE = Path(gpuclassify.__file__).parent
CONTEXT = click.Context(main)
COMMANDS = [main.get_command(CONTEXT, name) for name in main.list_commands(CONTEXT)]
PARAMETERS = [own for each in COMMANDS for own in each.get_params(click.Context(each))]
OPTIONS = {flag for own in PARAMETERS for flag in own.opts if "--" in flag}
# What the command line alone has, and files that are shell scripts.
OF_COMMANDS = {"commands", "settings.py", "slurm_script.py"}


def texts(path):
    """The texts of a module but docstrings, those of other programs' commands left out."""
    tree = ast.parse(path.read_text())
    of_texts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
                for part in node.values}  # fmt: skip
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", 0), list)]
    of_texts |= {id(body[0].value) for body in bodies if isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in of_texts and isinstance(node, ast.JoinedStr | ast.Constant):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            found = [str(part.value) for part in parts if isinstance(part, ast.Constant)]
            yield node.lineno, re.sub("`[^`]*`", "", "".join(found))


def test_messages_name_no_options():
    assert {"--on-error", "--restart", "--field", "--against"} <= OPTIONS
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in PACKAGE.rglob("*.py")
        if not OF_COMMANDS & set(path.relative_to(PACKAGE).parts)
        for line, text in texts(path)
        if " " in text.strip() and OPTIONS & set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('To go on without it: on_error="quarantine".',
         'To go on without it: --on-error quarantine.'),
        ("start over (restart=True, as before)", "start over (--restart, as before)"),
        ("restart= or class_weight={'a': 2.5}", "--restart or class_weight={'a': 2.5}"),
        ("leave restart=False out", "leave --resume out"),
        ("strict=False", "strict=False"),  # which no option is
        ("name the columns (fields=), or types=", "name the columns (--field), or --type"),
        ('such as types={"price": "double"}', "such as --type price=double"),
        ("thresholds=[1]", "thresholds=[1]"),
        ("make parts larger (part_bytes=)", "make parts larger (--part-size)"),
        ("pass DomainClassifier(strict=True, model=None) again, or model=x",
         "pass DomainClassifier(strict=True, model=None) again, or --model x"),
        ("f(on_error=g(1), model=2), then unknown=3", "f(on_error=g(1), model=2), then unknown=3"),
        ("a.model=x (model=", "a.model=x (--model"),
        ("types={'a price': 'json'}", "--type a price=json"),
        ("annotate it again (redo_changed=True), or",  # another command's
         "annotate it again (`gpuclassify annotate --redo-changed`), or"),
        ("start over (annotate=True), or", "start over, or"),
        ('types={"a": "list<int>", \'b\': "x"}', "--type a=list<int> --type b=x"),
        ("partition_by=['a', 'b'] is for", "--partition-by a --partition-by b is for"),
        ("partition_by=[] or types={1: 2}", "partition_by=[] or types={1: 2}"),
        ('pass long_text="windows" or long_text=3', "pass --set long_text=windows or "
         "--set long_text=3"),
        ("it has (id=3) and (strict=)", "it has (id=3) and (--strict)"),
        *((text, text) for text in ("no files in s3://in/format=json/model=x/0.jsonl",
                                    "https://host/in?limit=3&model=x", "the column 'limit=3'")),
    ],
)  # fmt: skip
def test_arguments_become_options(message, expected):
    assert with_options(message, main.get_command(CONTEXT, "classify")) == expected


def wrong_value(option):
    if isinstance(option.type, click.Choice):
        return "wrong"
    is_number = option.type.name.partition(" ")[0] in ("integer", "float")
    return "-5" if is_number else "" if option.name.endswith("_field") else None


FAMILY = ("--classifier", "domain")
# Arguments of valid calls, by command.
VALID = {
    "agreement": ("in", "--between", "good", "--between", "topic"),
    **dict.fromkeys(("annotate", "classify"), ("in", "out", *FAMILY)),
    **dict.fromkeys(("plan", "preview"), ("in", *FAMILY)),
    "compare": ("in", *FAMILY, "--with", "dtype=bfloat16"),
    "buckets": ("in", "out", "--score", "score"),
    "decontaminate": ("in", "out", "--against", "in", "--against-field", "text"),
    "dedup": ("in", "out", "--method", "fuzzy"),
    "mix": ("in", "out.json", "--by", "topic", "--tokens", "5"),
    "sample": ("in", "out.jsonl", "-n", "1"),
    "select": ("in", "out", "--where", "id > 0"),
    "thresholds": ("in", "out.json", "--score", "score", "--label", "good", "--recall", "0.5"),
}


@pytest.mark.parametrize("command", VALID)
def test_a_wrong_value_is_refused_by_the_name_of_its_option(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    lines = [json.dumps(ROW | {"good": good}) for good in (True, False)]
    Path("in/0.jsonl").write_text("\n".join(lines))
    wrong = []
    for option in main.get_command(CONTEXT, command).get_params(CONTEXT):
        value = wrong_value(option)
        if value is None:
            continue
        flag = max(option.opts, key=len)
        done = CliRunner().invoke(main, [command, *VALID[command], flag, value])
        argument = re.search(rf"\b{option.name}=", done.stderr)
        if done.exit_code != 2 or f" {flag}" not in done.stderr.replace("'", " ") or argument:
            wrong.append((flag, done.stderr))
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "flag"),
    [("mix", "--by"), ("mix", "--tokens"), ("thresholds", "--score"), ("thresholds", "--label"),
     ("train", "--label-field"), ("train", "--backbone")],
)  # fmt: skip
def test_a_missing_option_is_named(command, flag):
    needed = ("--by", "--tokens", "--score", "--label", "--label-field", "--backbone")
    options = {option for own in main.get_command(CONTEXT, command).get_params(CONTEXT)
               for option in own.opts} & {*needed} - {flag}  # fmt: skip
    words = [word for option in sorted(options) for word in (option, "1")]
    done = CliRunner().invoke(main, [command, "in", "out.json", *words])
    assert (done.exit_code, f"Missing option '{flag}'" in done.stderr) == (2, True), done.stderr


def test_a_long_message_is_read_in_no_time():
    for piece in ("f(", "(", "a=", "f(()", "a={"):
        with_options(piece * 200_000, click.Command("none"))


ROW = {"id": 1, "text": "a", "score": 0.5, "good": True, "topic": "x", "tokens": 3}
BROKEN = {
    "cut": '{"id": 1, "te',
    "surrogate": json.dumps(ROW | {"text": "\ud83d"}),
    "mixed": json.dumps(ROW | {"score": [1]}),
    "fields": json.dumps(ROW | {"score": {"a": 1}}),
    "new": None,  # a file that the annotation set lacks
}
CALLS = {
    "sample": ["in", "out.jsonl", "-n", "5", "--annotations", "notes"],
    "agreement": ["in", "--between", "score", "--between", "tokens", "--page", "page.html",
                  "--annotations", "notes"],
    "thresholds": ["in", "out.json", "--score", "score", "--label", "good", "--recall", "0.5",
                   "--annotations", "notes"],
    "show": ["notes", "--input", "in"],
    "mix": ["in", "out.json", "--by", "text", "--by", "score", "--tokens", "5",
            "--annotations", "notes"],
    "select": ["in", "out", "--annotations", "notes"],
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("command", CALLS)
def test_advice_names_options_that_the_command_has(command, broken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/0.jsonl").write_text(json.dumps(ROW) + "\n")
    words = CALLS[command]
    if broken == "new" or command == "show":
        stages = [FileReader("in"), lambda frame: frame.assign(n=1), AnnotationWriter("notes")]
        Pipeline(stages).run(report=lambda *_: None)
        Path("in/1.jsonl").write_text(f"{BROKEN[broken] or json.dumps(ROW)}\n")
        words = [*words, "--annotations-incomplete"] if broken != "new" else words
    else:
        with Path("in/0.jsonl").open("a") as file:
            file.write(BROKEN[broken] + "\n")
        words = [word for word in words if word not in ("--annotations", "notes")]
        words += ["--where", "id > 0"] if command == "select" else []
    done = CliRunner().invoke(main, [command, *words])
    assert done.exit_code in (1, 2), done.output
    params = main.get_command(CONTEXT, command).get_params(CONTEXT)
    known = {flag for param in params for flag in (*param.opts, *param.secondary_opts)}
    message = done.stderr.replace("-h", "").replace("--help", "")
    assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]*", message)} <= known, message
    assert not re.findall(r"\b(?:on_error|fields|types|surrogates|annotations_complete)=", message)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_frame_of_files_has_the_advice_that_jobs_have(kind, tmp_path):
    path = tmp_path / f"in.{kind}"
    path.write_bytes(b'{"id": 1}\n{"id')
    job = Pipeline([FileReader(path), JsonlWriter(tmp_path / "out")])
    for read in (lambda: read_files(path), job.prepare):
        with pytest.raises(ValueError, match='To go on without it: on_error="quarantine"'):
            read()
