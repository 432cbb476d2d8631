"""Golden cases: texts with the columns that real weights are known to give for them.

A file holds one JSON object a line:

    {"classifier": "DomainClassifier", "arguments": {"model": "/models/domain"},
     "text": "Shares fell after the bank raised its rates.",
     "expected": {"domain_pred": "Finance"}, "tolerance": 0.01}

`classifier` is a public class of gpuclassify, `arguments` what its constructor is given (default:
nothing), `text` one document or null. `expected` names some or all new columns: a string, boolean,
whole number or null must be equal; a number with a fraction, or a list of numbers, may differ by
`tolerance` (default 0.001) absolutely. A row that a filter drops has ``"expected": null``.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

import gpuclassify

KEYS = {"classifier", "arguments", "text", "expected", "tolerance"}


@dataclass
class Case:
    where: str
    classifier: str
    text: str | None
    expected: dict | None
    arguments: dict = field(default_factory=dict)
    tolerance: float = 1e-3


def read_cases(path):
    """Every case of a file; ValueError names the line that is none."""
    cases = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            cases.append(_case(line, f"{path}:{number}"))
    if not cases:
        raise ValueError(f"{path} holds no case")
    return cases


def check_case(case):
    """Run the case's classifier on its text; AssertionError names every column that differs."""
    mapper = getattr(gpuclassify, case.classifier)(**case.arguments)
    found = mapper(pd.DataFrame({"text": pd.Series([case.text], dtype="str")}))
    if case.expected is None or not len(found):
        assert case.expected is None and not len(found), f"{case.where}: kept {len(found)} rows"
        return
    row = found.iloc[0]
    absent = sorted(set(case.expected) - set(found.columns))
    assert not absent, f"{case.where}: no columns {absent}; there are {list(found.columns)}"
    wrong = [
        f"{name} is {row[name]!r}, not {value!r}"
        for name, value in case.expected.items()
        if not _agrees(row[name], value, case.tolerance)
    ]
    assert not wrong, f"{case.where}: {'; '.join(wrong)}"


def _case(line, where):
    try:
        content = json.loads(line)
    except ValueError as err:
        raise ValueError(f"{where} is not JSON: {err}") from err
    unknown = set(content) - KEYS
    missing = {"classifier", "text", "expected"} - set(content)
    if unknown or missing:
        raise ValueError(f"{where}: unknown keys {sorted(unknown)}, missing {sorted(missing)}")
    if content["classifier"] not in gpuclassify.__all__:
        raise ValueError(f"{where}: gpuclassify has no {content['classifier']!r}")
    return Case(where=where, **content)


def _agrees(found, expected, tolerance):
    if isinstance(expected, list):
        if not hasattr(found, "__len__") or len(found) != len(expected):
            return False
        pairs = zip(found, expected, strict=True)
        return all(_agrees(one, other, tolerance) for one, other in pairs)
    if expected is None or pd.isna(found):
        return expected is None and bool(pd.isna(found))
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=0, abs_tol=tolerance)
    return bool(found == expected)
