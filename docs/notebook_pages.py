"""Notebooks as pages, with the outputs that are saved in them: nothing runs."""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
LINK = re.compile(r"\.\./notebooks/([\w-]+)\.ipynb\)")


def fill(text: str, page: str, *, as_html: bool) -> str:
    """Return a page of ``notebooks/`` with its notebook; others with links to such pages."""
    folder, _, name = page.rpartition("/")
    if folder != "notebooks" or name == "index":
        return LINK.sub(r"notebooks/\1.md)", text)
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    title, _, rest = "\n\n".join(_shown(cell, as_html) for cell in cells).partition("\n")
    return f"{title}\n\n{text}{rest}\n"


def _shown(cell: dict[str, Any], as_html: bool) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    outputs = (_output(output, as_html) for output in cell["outputs"])
    return "\n\n".join([_fence("python", source), *outputs])


def _output(output: dict[str, Any], as_html: bool) -> str:
    """Return an output in its richest form; Markdown alone says where a picture was."""
    data = {"text/plain": output.get("text", "")} | output.get("data", {})
    found = {kind: "".join(content) for kind, content in data.items()}
    if as_html and "text/html" in found:
        return _raw(found["text/html"])
    if "image/png" not in found:
        return _fence("text", found["text/plain"])
    if not as_html:
        return "*(a picture)*"
    source = f"data:image/png;base64,{found['image/png'].strip()}"
    return _raw(f'<img alt="What the code above draws" src="{source}">')


def _raw(html: str) -> str:
    return _fence("{raw} html", f'<div class="notebook-output">{html}</div>')


def _fence(language: str, content: str) -> str:
    return f"````{language}\n{content.rstrip()}\n````"
