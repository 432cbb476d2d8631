"""How the site is built: ``make docs``, without a network."""

import inspect
import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import tables  # noqa: E402
import text_pages  # noqa: E402

from gpuclassify import __version__  # noqa: E402

project, author, version = "gpuclassify", "The gpuclassify developers", __version__
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx_click", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True  # every reference has a target, or the build fails
nitpick_ignore_regex = [("py:.*", ".*")]  # docstrings name what has no page, too
default_role = "py:obj"
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
numpydoc_show_class_members = False

html_theme = "pydata_sphinx_theme"
html_title = "gpuclassify"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
html_sidebars = {"index": [], "contributing": [], "changelog": []}
html_theme_options = {
    "header_links_before_dropdown": 7,
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc", "markdown-link"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

# What help() shows in one line for each setting, as numpydoc reads it.
SETTING = re.compile(r"^(\w+)( \(.*?\))?: ", re.MULTILINE)


def fill_page(_app, docname, source):
    """Put tables and drawings in their places, and take comments out, before a page is read."""
    source[0] = text_pages.with_drawings(tables.fill(source[0], docname), HERE)


def explain_settings(_app, what, _name, obj, _options, lines):
    """Give numpydoc the settings of a class in its own form, with their types."""
    if what != "class" or not hasattr(obj, "__signature__"):
        return
    parameters = inspect.signature(obj).parameters

    def entry(found):
        name, choices = found[1], found[2]
        if name not in parameters:
            return found[0]
        kind = (choices or f" ({parameters[name].annotation})")[2:-1]
        return f"{name} : {kind}\n    "

    text = "\n".join(lines)
    head, title, rest = text.partition("Parameters\n----------\n")
    own, *after = re.split(r"^(?=\w+\n-{4,})", rest, maxsplit=1, flags=re.MULTILINE)
    lines[:] = "".join([head, title, SETTING.sub(entry, own), *after]).splitlines()


def shorten_signature(_app, what, _name, obj, _options, _signature, _returned):
    """A signature of forty settings says less than the list of them below it."""
    if what == "class" and len(inspect.signature(obj).parameters) > 12:
        return "(*, ...)", None
    return None


def escape_globs(_app, _context, lines):
    """Let the asterisks of a command's help be asterisks."""
    lines[:] = [line.replace("*", r"\*") for line in lines]


def write_text(app, error):
    """Write each page as Markdown beside its HTML, and what an assistant should read first."""
    if error is None and app.builder.name == "html":
        text_pages.write(app.env, Path(app.outdir), HERE)
        shutil.copytree(HERE / "drawings", Path(app.outdir, "drawings"), dirs_exist_ok=True)


def setup(app):
    """Connect what is above."""
    app.connect("source-read", fill_page)
    app.connect("autodoc-process-docstring", explain_settings, priority=400)  # before numpydoc
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("sphinx-click-process-description", escape_globs)
    app.connect("build-finished", write_text)
