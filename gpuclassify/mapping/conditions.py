"""Conditions on columns, in the words of pandas: parsed, checked against a schema, and evaluated.

Python's own parser reads them, and what is not named here is refused: nothing is ever called.
Null is unknown, as in SQL: what follows from it is null.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import is_text
from gpuclassify.settings.checks import nearest

LONGEST, DEEPEST = 10_000, 100  # characters of a condition, and levels
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`([^`]*)`""")
_COMPARE: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_CALCULATE: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: pc.add,
    ast.Sub: pc.subtract,
    ast.Mult: pc.multiply,
    ast.Div: lambda one, other: pc.divide(one.cast(pa.float64()), other.cast(pa.float64())),
}
_SYMBOLS = {ast.BitAnd: "and", ast.BitOr: "or", ast.Invert: "not", ast.BitXor: "!="}
_TAKES = (
    "A condition takes columns, numbers, texts, True and False, ==, !=, <, <=, >, >=, in, not in, "
    "is None, is not None, and, or, not, +, -, *, / and parentheses"
)
Value = Any  # an array or scalar of Arrow


@dataclass(frozen=True)
class Condition:
    """Condition whose `terms`, joined by "and", each hold or not for a row."""

    terms: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition; raise ValueError for what is none."""
        tree = _parsed(text)
        named = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        columns = dict.fromkeys(name.strip("`") for name in named)
        if not columns:
            raise ValueError(f'where={text!r} names no column: such as where="score > 2.5"')
        return cls(tuple(map(ast.unparse, _terms(tree))), tuple(columns))

    def check(self, schema: pa.Schema) -> None:
        """Raise ValueError for a column that is not there, TypeError for types that do not fit."""
        for name in self.columns:
            if name not in schema.names:
                raise ValueError(
                    f"where= names no column {name!r}; columns are {schema.names}."
                    f"{nearest(name, schema.names)}"
                )
        self.evaluate(schema.empty_table())

    def evaluate(self, table: pa.Table) -> dict[str, pa.Array]:
        """Return for each term whether rows meet it: true, false or null."""
        columns = {name: _plain(table[name]) for name in self.columns}
        return {term: _evaluator(term)(columns, len(table)) for term in self.terms}


@functools.lru_cache(maxsize=256)
def _evaluator(term: str) -> Callable[[Mapping[str, pa.Array], int], pa.Array]:
    tree = _parsed(term)

    def evaluate(columns: Mapping[str, pa.Array], rows: int) -> pa.Array:
        met = _value(tree, columns)
        if _kind(met.type) not in ("bool", "null"):
            raise TypeError(
                f"where= has {term!r}, which is {met.type} and no condition: compare it"
            )
        if isinstance(met, pa.Scalar):
            return pa.array([met.as_py()] * rows, pa.bool_())
        return met.cast(pa.bool_())

    return evaluate


def _parsed(text: str) -> ast.expr:
    """Parse a text; names in backquotes are columns whose names Python would not take."""
    names: list[str] = []

    def named(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        names.append(match[1])
        return f" _quoted_{len(names) - 1}_ "

    try:
        if len(text) > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} characters")
        tree = ast.parse(_QUOTED.sub(named, text).strip(), mode="eval").body
        _check_nodes(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        reason = err.msg if isinstance(err, SyntaxError) else str(err)
        raise ValueError(f"where={text[:200]!r} is no condition: {reason}. {_TAKES}") from err
    for node in ast.walk(tree):
        match = re.fullmatch(r"_quoted_(\d+)_", node.id) if isinstance(node, ast.Name) else None
        if match and int(match[1]) < len(names):
            vars(node)["id"] = f"`{names[int(match[1])]}`"
    return tree


def _check_nodes(node: ast.AST, depth: int = 0) -> None:
    """Raise ValueError for anything that a condition does not take."""
    if depth > DEEPEST:
        raise ValueError(f"it is nested more than {DEEPEST} deep")
    match node:
        case ast.BoolOp(values=parts):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=part):
            parts = [part]
        case ast.Compare(left=left, ops=ops, comparators=[*others]):
            for op, other in zip(ops, others, strict=True):
                is_list = isinstance(other, ast.List | ast.Tuple | ast.Set)
                is_none = isinstance(other, ast.Constant) and other.value is None
                if isinstance(op, ast.Is | ast.IsNot) != is_none:
                    raise ValueError("null is found by `is None` and `is not None`")
                if isinstance(op, ast.In | ast.NotIn) != is_list:
                    raise ValueError("`in` takes a list, such as label in ['a', 'b']")
            parts = [left]
            for other in others:
                parts += getattr(other, "elts", [other])
                if hasattr(other, "elts") and not all(map(_is_constant, other.elts)):
                    raise ValueError("a list holds numbers or texts")
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            parts = [left, right]
        case ast.Name() | ast.Constant(value=str() | int() | float() | None):
            parts = []
        case ast.BinOp(op=op) | ast.UnaryOp(op=op) if type(op) in _SYMBOLS:
            raise ValueError(f"write {_SYMBOLS[type(op)]!r}, which binds as words do")
        case _:
            raise ValueError(f"it has {ast.unparse(node)[:80]!r}, which is not taken")
    for part in parts:
        _check_nodes(part, depth + 1)


def _is_constant(node: ast.expr) -> bool:
    inner = node.operand if isinstance(node, ast.UnaryOp) else node
    return isinstance(inner, ast.Constant) and inner.value is not None


def _terms(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return [term for value in tree.values for term in _terms(value)]
    return [tree]


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, of a type that comparisons take if there is one."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        column, kind = pa.chunked_array([c.storage for c in column.chunks], kind.storage_type), kind
        kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_text(kind) or pa.types.is_string_view(kind):
        kind = pa.large_string()
    if pa.types.is_float16(kind):
        kind = pa.float32()
    column = column if kind == column.type else column.cast(kind)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _kind(kind: pa.DataType) -> str:
    if is_text(kind):
        return "text"
    for name, is_kind in (
        ("bool", pa.types.is_boolean),
        ("number", pa.types.is_integer),
        ("number", pa.types.is_floating),
        ("number", pa.types.is_decimal),
        ("time", pa.types.is_temporal),
        ("null", pa.types.is_null),
    ):
        if is_kind(kind):
            return name
    return "other"


def _value(node: ast.AST, columns: Mapping[str, pa.Array]) -> Value:
    """Return the value of an expression that `_check_nodes` lets pass."""
    match node:
        case ast.Name(id=name):
            return columns[name.strip("`")]
        case ast.Constant(value=value):
            return pa.scalar(value, pa.large_string() if isinstance(value, str) else None)
        case ast.BoolOp(op=op, values=values):
            met = [_condition(value, columns) for value in values]
            join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
            return functools.reduce(join, met)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return pc.invert(_condition(operand, columns))
        case ast.UnaryOp(operand=operand):
            return pc.negate(_number(operand, columns))
        case ast.BinOp(left=left, op=op, right=right):
            return _CALCULATE[type(op)](*_alike(_number(left, columns), _number(right, columns)))
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip([left, *others], ops, others, strict=False)
            met = [_compared(one, op, other, columns) for one, op, other in pairs]
            return functools.reduce(pc.and_kleene, met)
    raise AssertionError(ast.dump(node))


def _condition(node: ast.expr, columns: Mapping[str, pa.Array]) -> Value:
    value = _value(node, columns)
    if _kind(value.type) not in ("bool", "null"):
        raise TypeError(
            f"where= has {ast.unparse(node)!r}, which is {value.type} and no condition: compare it"
        )
    return value.cast(pa.bool_())


def _number(node: ast.expr, columns: Mapping[str, pa.Array]) -> Value:
    value = _value(node, columns)
    if _kind(value.type) not in ("number", "null"):
        raise TypeError(f"where= calculates with {ast.unparse(node)!r}, which is {value.type}")
    return value.cast(pa.float64()) if _kind(value.type) == "null" else value


def _compared(
    one: ast.expr, op: ast.cmpop, other: ast.expr, columns: Mapping[str, pa.Array]
) -> Value:
    left = _value(one, columns)
    if isinstance(op, ast.Is | ast.IsNot):
        is_null = pc.is_null(left)
        return is_null if isinstance(op, ast.Is) else pc.invert(is_null)
    if not isinstance(op, ast.In | ast.NotIn):
        return _compare(one, op, other, left, _value(other, columns))
    elements = getattr(other, "elts", [])
    is_in = functools.reduce(
        pc.or_kleene,
        [_compare(one, ast.Eq(), each, left, _value(each, columns)) for each in elements],
        pc.and_kleene(pc.is_null(left), pa.scalar(None, pa.bool_())),  # false, for null null
    )
    return is_in if isinstance(op, ast.In) else pc.invert(is_in)


def _compare(one: ast.expr, op: ast.cmpop, other: ast.expr, left: Value, right: Value) -> Value:
    kinds = _kind(left.type), _kind(right.type)
    for side, value in ((one, left), (other, right)):
        if _kind(value.type) == "other":
            raise TypeError(
                f"where= compares {ast.unparse(side)!r}, which is {value.type}: such values can be "
                "asked for null alone, by `is None` and `is not None`"
            )
    if kinds in (("time", "text"), ("text", "time")):
        try:
            left, right = _as_times(left, right)
        except pa.ArrowInvalid as err:
            raise TypeError(f"where= compares a time with what is none: {err}") from err
    elif kinds[0] != kinds[1] and "null" not in kinds:
        raise TypeError(
            f"where= compares {ast.unparse(one)!r}, which is {left.type}, with "
            f"{ast.unparse(other)!r}, which is {right.type}: compare {kinds[0]} with {kinds[0]}"
        )
    elif kinds[0] != kinds[1]:
        left, right = (
            v.cast(o.type) if k == "null" else v
            for v, o, k in ((left, right, kinds[0]), (right, left, kinds[1]))
        )
    elif kinds[0] == "number":
        left, right = _alike(left, right)
    return _COMPARE[type(op)](left, right)


def _alike(left: Value, right: Value) -> tuple[Value, Value]:
    """Return two numbers; one of the condition has the precision of a column of fractions."""
    for scalar, array in ((left, right), (right, left)):
        is_pair = isinstance(scalar, pa.Scalar) and isinstance(array, pa.Array)
        if is_pair and pa.types.is_floating(array.type):
            changed = pa.scalar(scalar.as_py(), pa.float64()).cast(array.type)
            return (changed, right) if scalar is left else (left, changed)
    return left, right


def _as_times(left: Value, right: Value) -> tuple[Value, Value]:
    kind = left.type if _kind(left.type) == "time" else right.type
    return tuple(v if v.type == kind else v.cast(pa.string()).cast(kind) for v in (left, right))
