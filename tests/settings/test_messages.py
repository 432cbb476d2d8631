"""Messages name the library's arguments; the command line makes them its options."""

import ast
import re
from pathlib import Path

import click
import pytest

import gpuclassify
from gpuclassify.commands.cli import main
from gpuclassify.commands.console import with_options

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
    ],
)  # fmt: skip
def test_arguments_become_options(message, expected):
    assert with_options(message, main.get_command(CONTEXT, "classify")) == expected


def test_a_long_message_is_read_in_no_time():
    for piece in ("f(", "(", "a=", "f(()", "a={"):
        with_options(piece * 200_000, click.Command("none"))
