"""Each page as Markdown next to its HTML, and llms.txt, which lists the pages."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import notebook_pages
import tables

DRAWING = re.compile(r"^!\[([^\]]*)\]\(((?:\.\./)*drawings/[\w-]+\.svg)\)$", re.MULTILINE)
DIRECTIVES = re.compile(r"^```\{(eval-rst|toctree)\}\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|method):: (\S+)", re.MULTILINE)
INCLUDE = re.compile(r"^```\{include\} (\S+)\n```\n", re.MULTILINE)
CODE = re.compile(r"^```\{literalinclude\} (\S+)\n:language: (\w+)\n```\n", re.MULTILINE)
ROLE = re.compile(r"\{py:\w+\}`~?([\w.]+)`")
TARGET = re.compile(r"^\([\w-]+\)=\n", re.MULTILINE)
LINKED = ("benchmarks/results", "notebooks")  # folders next to docs/
OUTSIDE = re.compile(rf"\((?:\.\./)+({'|'.join(LINKED)})/")
SUMMARY = "Text classifiers over Dask DataFrames of any size, on GPUs or CPUs."


def with_drawings(text: str, folder: Path) -> str:
    """Return the page with inline drawings, which take the colours of the theme."""

    def drawn(found: re.Match[str]) -> str:
        svg = (folder / "drawings" / Path(found[2]).name).read_text(encoding="utf-8")
        figure = f'<figure class="drawing" role="img" aria-label="{found[1]}">\n{svg}</figure>'
        return f"```{{raw}} html\n{figure}\n```"

    return DRAWING.sub(drawn, text)


def write(env: Any, output: Path, source: Path) -> None:
    """Write ``PAGE.md`` for each page, ``llms.txt``, and the linked results and notebooks."""
    for folder in LINKED:
        shutil.copytree(source.parent / folder, output / folder, dirs_exist_ok=True)
    for page in env.found_docs:
        path = output / f"{page}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(plain(source / f"{page}.md", page), encoding="utf-8")
    lines = ["# gpuclassify", "", f"> {SUMMARY}", ""]
    for page in _in_order(env, env.config.root_doc):
        title = env.titles[page].astext()
        lines.append(f"- [{title}]({page}.md)")
    (output / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def plain(path: Path, page: str) -> str:
    """Return a page as plain Markdown, with tables, notebooks and reference as text."""
    text = tables.fill(path.read_text(encoding="utf-8"), page)
    text = notebook_pages.fill(text, page, as_html=False)
    text = INCLUDE.sub(lambda found: (path.parent / found[1]).read_text(encoding="utf-8"), text)
    text = CODE.sub(
        lambda found: f"```{found[2]}\n{(path.parent / found[1]).read_text(encoding='utf-8')}```\n",
        text,
    )
    seen: dict[tuple[str, str], str] = {}
    text = DIRECTIVES.sub(lambda found: _reference(found[1], found[2], seen), text)
    up = os.path.relpath(".", Path(page).parent)
    text = OUTSIDE.sub(rf"({up}/\1/", TARGET.sub("", text))
    return ROLE.sub(lambda found: f"`{found[1]}`", text)


def _reference(kind: str, content: str, seen: dict[tuple[str, str], str]) -> str:
    if kind == "toctree":
        pages = [line for line in content.splitlines() if line and not line.startswith(":")]
        return "".join(f"- [{page}]({page}.md)\n" for page in pages)
    return "\n".join(tables.describe(name, seen) for name in DIRECTIVE.findall(content))


def _in_order(env: Any, page: str) -> list[str]:
    """Return the page and all pages below it, in the order of the table of contents."""
    below = env.toctree_includes.get(page, [])
    return [page, *(name for child in below for name in _in_order(env, child))]
