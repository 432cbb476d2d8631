"""How the site is built: ``make docs``, without a network."""

import inspect
import shutil
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "tests")]

import notebook_pages  # noqa: E402
import tables  # noqa: E402
import text_pages  # noqa: E402

from gpuclassify import __version__  # noqa: E402
from gpuclassify.mapping.text_mapper import TextMapper  # noqa: E402
from gpuclassify.settings.signatures import NEXT_SECTION  # noqa: E402

project, author, version = "gpuclassify", "The gpuclassify developers", __version__
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "sphinx_copybutton"]
nitpicky = True  # every reference has a target, or the build fails
nitpick_ignore_regex = [("py:.*", ".*")]  # docstrings name what has no page, too
default_role = "py:obj"
smartquotes = False
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"
toc_object_entries = False
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
numpydoc_show_class_members = False

html_theme = "pydata_sphinx_theme"
html_title = "gpuclassify"
html_static_path = ["_static"]
templates_path = ["_templates"]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
html_sidebars = {"index": [], "contributing": [], "security": [], "changelog": []}
html_theme_options = {
    "header_links_before_dropdown": 5,
    "navbar_end": ["theme-switcher"],
    "secondary_sidebar_items": ["page-toc", "markdown-link"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}


def fill_page(_app, docname, source):
    """Insert tables, notebooks and drawings before a page is read."""
    text = notebook_pages.fill(tables.fill(source[0], docname), docname, as_html=True)
    source[0] = text_pages.with_drawings(text, HERE)


def explain_settings(_app, what, _name, obj, _options, lines):
    """Convert the settings of a class to numpydoc's form, without those that all mappers share."""
    head, title, rest = "\n".join(lines).partition("Parameters\n----------\n")
    if what != "class" or not title or not hasattr(obj, "__signature__"):
        return
    parameters = inspect.signature(obj).parameters
    settings, *after = NEXT_SECTION.split(rest, maxsplit=1)
    shared = set()
    if issubclass(obj, TextMapper):
        shared = tables.shared_settings(settings) - set(obj.defaults)
    entries = [
        f"{name} : {_kind(parameters[name], choices)}\n{textwrap.indent(text.strip(), '    ')}\n"
        for name, choices, text in tables.SETTING.findall(settings)
        if name not in shared
    ]
    lines[:] = "".join([head, *([title, *entries, "\n"] if entries else []), *after]).splitlines()


def _kind(parameter, choices):
    kind = choices[2:-1] or str(parameter.annotation).removesuffix(" | None").replace(
        "StrPath", "str or path"
    )
    if parameter.default is parameter.empty:
        return kind
    return (
        f"{kind}, optional"
        if parameter.default is None
        else f"{kind}, default {parameter.default!r}"
    )


def shorten_signature(_app, what, _name, obj, _options, _signature, _returned):
    """Shorten a class's signature of more than 12 parameters, which are listed below it anyway."""
    if what == "class" and len(inspect.signature(obj).parameters) > 12:
        return "(*, ...)", None
    return None


def write_text(app, error):
    """Write each page as Markdown next to its HTML, and llms.txt."""
    if error is None and app.builder.name == "html":
        text_pages.write(app.env, Path(app.outdir), HERE)
        shutil.copytree(HERE / "drawings", Path(app.outdir, "drawings"), dirs_exist_ok=True)


def setup(app):
    """Connect the functions above to Sphinx's events."""
    app.connect("source-read", fill_page)
    app.connect("autodoc-process-docstring", explain_settings, priority=400)  # before numpydoc
    app.connect("autodoc-process-signature", shorten_signature)
    app.connect("build-finished", write_text)
