"""A setting is declared in one place: a field of the options class of a classifier's family."""

import json

# A family with one setting more, which is declared here and nowhere else.
FAMILY = '''
import inspect

from click.testing import CliRunner

from gpuclassify.classifiers import FAMILIES
from gpuclassify.classifiers.category import CategoryClassifier
from gpuclassify.commands.cli import main
from gpuclassify.settings.declared import declared, setting
from gpuclassify.settings.options import ROWS, ClassifierOptions


@declared
class LoudOptions(ClassifierOptions):
    """Settings of a family.

    Attributes
    ----------
    loudness : float
        Share of capital letters. Default: any.
    """

    loudness: float | None = setting(default=None, is_share=True, group=ROWS)


class LoudClassifier(CategoryClassifier):
    """Classifier of a family."""

    Options = LoudOptions
    defaults = {"label_field": "loud"}


FAMILIES["loud"] = LoudClassifier
'''
USES = """
print(inspect.signature(LoudClassifier), LoudClassifier.__doc__)
print(LoudClassifier(model="m", loudness=0.5))
command = ["classify", {source!r}, {output!r}, "--classifier", "loud", "--model", {model!r}]
calls = [
    ["classify", "--help"],
    [*command, "--loudness", "2"],
    [*command, "--loudness", "loud:0.5", "--dump-config", {config!r}],
    ["classify", "--config", {config!r}, "--cluster", "cpu", "--workers", "1"],
]
for call, code in zip(calls, (0, 2, 0, 0), strict=True):
    done = CliRunner().invoke(main, call)
    assert done.exit_code == code, done.output
    print(done.output)
"""


def test_a_new_setting_of_a_family_is_declared_once(run_python, checkpoint, tmp_path):
    paths = {name: str(tmp_path / name) for name in ("source", "output", "config")}
    paths["source"] += ".jsonl"
    (tmp_path / "source.jsonl").write_text('{"text": "SALE now"}\n')
    printed = run_python(FAMILY + USES.format(model=str(checkpoint("domain")), **paths))
    assert "loudness: float | None = None" in printed  # the signature
    assert "loudness: Share of capital letters. Default: any." in printed  # the docstring
    assert "LoudClassifier(model='m', loudness=0.5)" in printed
    assert "--loudness NUMBER Share of capital letters. Default: any." in " ".join(printed.split())
    assert "--loudness 2.0 is not from 0 to 1" in printed
    assert "loudness: 0.5" in (tmp_path / "config").read_text()
    report = json.loads((tmp_path / "output/_report/report.json").read_text())
    assert report["settings"]["stage 1 LoudClassifier"]["loudness"] == 0.5
