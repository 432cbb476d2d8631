"""Every block of code that the documentation shows runs, or is checked where it cannot."""

import ast
import configparser
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import gpuclassify
from gpuclassify.cli import main
from tests.hub_server import HubServer
from tests.pages import PAGES, ROOT, read_blocks, write_models

HAS_CODE = [page for page in PAGES if list(read_blocks(page))]


def page_name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of a process that finds small copies of the published models on a Hub of this machine."""
    folder = tmp_path_factory.mktemp("models")
    with HubServer() as server:
        for name, model in write_models(folder).items():
            files = [path for path in model.rglob("*") if path.is_file()]
            server.add(
                name, {path.relative_to(model).as_posix(): path.read_bytes() for path in files}
            )
        yield os.environ | {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(folder / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }


@pytest.mark.parametrize("page", HAS_CODE, ids=page_name)
def test_what_a_page_shows_runs(page, environment, tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/pages.py", page],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", HAS_CODE, ids=page_name)
def test_calls_and_commands_of_a_page_exist(page):
    for block in read_blocks(page):
        place = f"{page_name(page)}:{block.line}"
        if block.language == "python":
            for node in ast.walk(ast.parse(block.code, place)):
                check_python(node, place)
        elif block.language == "bash":
            for line in block.code.replace("\\\n", "").splitlines():
                check_command(shlex.split(line, comments=True), place)


def check_python(node, place):
    """Imports name what exists, and calls of public names the arguments that these have."""
    if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "gpuclassify":
        for alias in node.names:
            exec(f"from {node.module} import {alias.name}")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        called = getattr(gpuclassify, node.func.id, None)
        if called is not None:
            names = {word.arg for word in node.keywords} - {None}
            parameters = inspect.signature(called).parameters
            is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            assert is_open or names <= set(parameters), f"{place}: {ast.unparse(node)}"


def check_command(words, place):
    """A command of gpuclassify has these options, and an extra of an installation exists."""
    for word in words:
        for extras in re.findall(r"^(?:gpuclassify|\.)\[(.+)\]$", word):
            config = configparser.ConfigParser()
            config.read(ROOT / "setup.cfg")
            known = set(config["options.extras_require"])
            assert set(extras.split(",")) <= known, f"{place}: {word}"
    while "gpuclassify" in words:
        words = words[words.index("gpuclassify") + 1 :]
        end = next((at for at, word in enumerate(words) if word in ("|", ">", "&&")), len(words))
        try:
            context = click.Context(main)
            name, command, rest = main.resolve_command(context, words[:end])
            command.make_context(name, rest, parent=context)
        except click.ClickException as error:
            pytest.fail(f"{place}: {' '.join(words[:end])}: {error.format_message()}")
