"""Parse, check and evaluate conditions on columns, in the language of ``DataFrame.query``.

Python's parser reads the conditions, but only the syntax listed here is accepted, so that a
condition cannot call anything. As in SQL, null is unknown, and so is every result that depends on
it.
"""

from __future__ import annotations

import ast
import functools
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuclassify.frames import is_text
from gpuclassify.settings.checks import nearest

LONGEST, DEEPEST = 10_000, 100  # maximum characters and nesting depth of a condition
DIGITS = 37  # digits of decimals; a product fits Arrow's widest decimal, with 76 digits
_WIDE = pa.decimal256(DIGITS, 0)  # type of integers that may exceed int64
_BELOW_2_63 = 2.0**63 - 1024  # largest float64 within int64
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|`([^`]*)`""")
_COMPARE: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}
_CALCULATE: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: pc.add_checked,
    ast.Sub: pc.subtract_checked,
    ast.Mult: pc.multiply_checked,
    ast.Div: pc.divide,  # operands are floats, so that division by zero is infinite
    ast.USub: pc.negate_checked,
}
# CPython before 3.13 may raise SystemError if two threads call `ast.parse`.
_parsing = threading.Lock()
_SURROGATE = re.compile("[\ud800-\udfff]")
_FLOAT32_MAX = float.fromhex("0x1.fffffep+127")
_TIMES = ("time", "time with a zone", "time of day")
_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_SYMBOLS = {ast.BitAnd: "and", ast.BitOr: "or", ast.Invert: "not", ast.BitXor: "!="}
_TAKES = (
    "A condition takes columns, numbers, texts, True and False, ==, !=, <, <=, >, >=, in, not in, "
    "is None, is not None, and, or, not, +, -, *, / and parentheses"
)
Value = Any  # an array or scalar of Arrow


@dataclass(frozen=True)
class Condition:
    """Parsed row filter, such as ``score > 2 and language == 'de'``.

    `terms` are the operands of its top-level "and", as strings. `columns` are the names of the
    columns that they read.
    """

    terms: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition; raise ValueError if it is invalid or names no column."""
        tree = _parsed(text)
        named = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
        columns = dict.fromkeys(name.strip("`") for name in named)
        if not columns:
            raise ValueError(f'where={text!r} names no column: such as where="score > 2.5"')
        return cls(tuple(map(ast.unparse, _terms(tree))), tuple(columns))

    def check(self, schema: pa.Schema) -> None:
        """Raise ValueError or TypeError unless the condition fits the columns of `schema`."""
        for name in self.columns:
            if name not in schema.names:
                raise ValueError(
                    f"where= names no column {name!r}; columns are {schema.names}."
                    f"{nearest(name, schema.names)}"
                )
        columns = {name: _plain(schema.empty_table()[name]) for name in self.columns}
        try:
            for term in self.terms:
                _evaluator(term)(columns, 0)
        except OverflowError as err:  # a calculation with constants only
            raise ValueError(str(err)) from err

    def evaluate(self, table: pa.Table) -> dict[str, pa.Array]:
        """Evaluate each term for every row of the table; a row meets the condition if all are true.

        Returns a boolean array (rows,) by the term's text in `terms`; null means unknown. Raises
        OverflowError if a calculation is too large.
        """
        columns = {name: _plain(table[name]) for name in self.columns}
        for name, column in columns.items():  # a column with only nulls is read as text
            if is_text(column.type) and column.null_count == len(column):
                columns[name] = pa.nulls(len(column))
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
    """Parse a condition to a syntax tree; quoted names keep their backquotes in `ast.Name`."""
    quoted: list[str] = []
    mark = "_quoted"

    def named(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        quoted.append(match[1])
        return f" {mark}{len(quoted) - 1} "

    try:
        if len(text) > LONGEST:
            raise ValueError(f"it has more than {LONGEST:,} characters")
        while mark in text:  # another column may have this name
            mark += "_"
        source = _QUOTED.sub(named, text).strip()
        with _parsing:
            tree = ast.parse(source, mode="eval").body
        lines = source.encode().splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                # Python's parser normalizes names; restore the original spelling.
                name = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
                is_quoted = name.startswith(mark)
                node.id = f"`{quoted[int(name.removeprefix(mark))]}`" if is_quoted else name
        _check_nodes(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as err:
        reason = err.msg if isinstance(err, SyntaxError) else str(err)
        raise ValueError(f"where={text[:200]!r} is no condition: {reason}. {_TAKES}") from err
    return tree


def _check_nodes(node: ast.AST, depth: int = 0) -> None:
    """Raise ValueError for syntax that conditions may not use, or nested deeper than `DEEPEST`."""
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
        case ast.Constant(value=int(value)) if abs(value) >= 10**DIGITS:
            raise ValueError(f"it has an integer of more than {DIGITS} digits")
        case ast.Constant(value=str(value)) if _SURROGATE.search(value):
            raise ValueError(f"it has the text {value!r}, which UTF-8 has no bytes for")
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
    """Prepare a column for comparisons: one array, of a wide type if possible, with NaN as null."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        column, kind = pa.chunked_array([c.storage for c in column.chunks], kind.storage_type), kind
        kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_text(kind):
        kind = pa.large_string()
    elif pa.types.is_float16(kind):
        kind = pa.float32()
    elif pa.types.is_uint64(kind):
        kind = _WIDE
    elif pa.types.is_integer(kind):
        kind = pa.int64()
    elif pa.types.is_decimal(kind):
        scale = max(kind.scale, 0)  # Arrow cannot compare decimals of negative scale
        kind = pa.decimal256(max(kind.precision + scale - kind.scale, DIGITS), scale)
    column = column if kind == column.type else column.cast(kind)
    return _without_nan(column.combine_chunks())


def _kind(kind: pa.DataType) -> str:
    for name, is_kind in (
        ("text", is_text),
        ("bool", pa.types.is_boolean),
        ("number", pa.types.is_integer),
        ("number", pa.types.is_floating),
        ("number", pa.types.is_decimal),
        ("time", pa.types.is_date),
        ("time", pa.types.is_timestamp),
        ("time of day", pa.types.is_time),
        ("duration", pa.types.is_duration),
        ("null", pa.types.is_null),
    ):
        if is_kind(kind):
            has_zone = name == "time" and getattr(kind, "tz", None) is not None
            return "time with a zone" if has_zone else name
    return "other"


def _value(node: ast.AST, columns: Mapping[str, pa.Array]) -> Value:
    """Evaluate a syntax tree for all rows; return an Arrow array, or a scalar for a constant."""
    match node:
        case ast.Name(id=name):
            return columns[name.strip("`")]
        case ast.Constant(value=str(value)):
            return pa.scalar(value, pa.large_string())
        case ast.Constant(value=value):
            is_wide = isinstance(value, int) and not -(2**63) <= value < 2**63
            return pa.scalar(value, _WIDE if is_wide else None)
        case ast.BoolOp(op=op, values=values):
            met = [_condition(value, columns) for value in values]
            join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
            return functools.reduce(join, met)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return pc.invert(_condition(operand, columns))
        case ast.UnaryOp(op=op, operand=operand):
            return _calculated(op, {operand: _number(operand, columns)}, node)
        case ast.BinOp(left=left, op=op, right=right):
            parts = {part: _number(part, columns) for part in (left, right)}
            return _calculated(op, parts, node)
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
        [_compare(one, ast.Eq(), item, left, _value(item, columns)) for item in elements],
        # The result is false if no item matches, and null for null.
        pc.and_kleene(pc.is_null(left), pa.scalar(None, pa.bool_())),
    )
    return is_in if isinstance(op, ast.In) else pc.invert(is_in)


def _compare(one: ast.expr, op: ast.cmpop, other: ast.expr, left: Value, right: Value) -> Value:
    kinds = _kind(left.type), _kind(right.type)
    if "null" in kinds:
        nulls = pc.and_(pc.is_null(left), pc.is_null(right))  # array if either side is one
        return pc.if_else(nulls, pa.scalar(None, pa.bool_()), pa.scalar(None, pa.bool_()))

    def shown(node: ast.expr, value: Value) -> str:
        return f"{ast.unparse(node)!r}, which is {value.type}"

    for side, value in ((one, left), (other, right)):
        if _kind(value.type) == "other":
            raise TypeError(
                f"where= compares {shown(side, value)}: such values can be asked for null alone, "
                "by `is None` and `is not None`"
            )
    both = f"{shown(one, left)}, with {shown(other, right)}"
    try:
        if kinds[0] in _TIMES and kinds[1] == "text":
            right = _as_time(right, left.type)
        elif kinds[1] in _TIMES and kinds[0] == "text":
            left = _as_time(left, right.type)
        elif {*kinds} == {"time", "time with a zone"}:
            nodes = dict(zip(kinds, map(ast.unparse, (one, other)), strict=True))
            raise TypeError(
                f"where= compares {both}: {nodes['time with a zone']!r} has a zone and "
                f"{nodes['time']!r} has none: convert one of them before, such as by "
                ".dt.tz_localize() of pandas"
            )
        elif kinds[0] != kinds[1]:
            raise TypeError(f"where= compares {both}: compare {kinds[0]} with {kinds[0]}")
        return _compare_like(_COMPARE[type(op)], left, right)
    except pa.ArrowException as err:
        reason = "a time with what is none: " if "text" in kinds else ""
        raise TypeError(f"where= cannot compare {both}: {reason}{err}") from err


def _compare_like(compare: Callable[..., Any], left: Value, right: Value) -> Value:
    """Compare two values of the same kind, such as numbers; `compare` is such as ``pc.less``.

    Integers and decimals are compared exactly, with each other and with floats. There are two
    exceptions: a decimal type with fraction digits is compared with floats as float64, and a
    constant float is rounded to float32 for a column of float32.
    """
    is_float = [pa.types.is_floating(value.type) for value in (left, right)]
    if all(is_float):
        left, right = _alike(left, right)
    elif is_float[1]:
        return _compare_with_floats(compare, left, right)
    elif is_float[0]:
        return _compare_with_floats(lambda one, other: compare(other, one), right, left)
    elif left.type != right.type and pa.types.is_temporal(left.type):
        left, right = _nanoseconds(left), _nanoseconds(right)
    return compare(left, right)


def _compare_with_floats(compare: Callable[..., Any], exact: Value, floats: Value) -> Value:
    """Compare integers or decimals with floats, as float64, by ``compare(exact, floats)``.

    Whole numbers that rounding to float64 makes equal to the float are compared exactly.
    """
    floats, rounded = pc.cast(floats, pa.float64()), _as_float64(exact)
    if pa.types.is_decimal(exact.type) and exact.type.scale:
        return compare(rounded, floats)
    if pa.types.is_integer(exact.type):
        rounded = pc.min_element_wise(rounded, _BELOW_2_63, skip_nulls=False)
    is_tie = pc.equal(rounded, floats)
    digits = pc.cast(pc.if_else(is_tie, floats, 0.0), exact.type)
    return pc.if_else(is_tie, compare(exact, digits), compare(rounded, floats))


def _calculated(op: ast.AST, parts: Mapping[ast.expr, Value], node: ast.AST) -> Value:
    """Apply the operator `op` to the values in `parts`, by their syntax trees; NaN becomes null."""

    def calculate(*values: Value) -> Value:
        values = _alike(*values)
        if isinstance(op, ast.Div) and not pa.types.is_floating(values[0].type):
            values = tuple(map(_as_float64, values))
        result = _CALCULATE[type(op)](*values)
        if pa.types.is_decimal(result.type):
            return pc.cast(result, pa.decimal256(DIGITS, result.type.scale))
        return _without_nan(result)

    values = [*parts.values()]
    try:
        return calculate(*values)
    except pa.ArrowInvalid as err:
        where = ""
        if rows := max(len(value) if isinstance(value, pa.Array) else 0 for value in values):
            row = _first_failing(calculate, values, rows)
            arrays = ((ast.unparse(n), v) for n, v in parts.items() if isinstance(v, pa.Array))
            shown = dict.fromkeys(f"{name} is {value[row]}" for name, value in arrays)
            where = f" in row {row}, where {' and '.join(shown)}"
        raise OverflowError(
            f"where= calculates {ast.unparse(node)!r}, which is too large{where}: integers have 64 "
            f"bits, and decimals {DIGITS} digits. Multiply by 1.0 to calculate with fractions"
        ) from err


def _first_failing(calculate: Callable[..., Any], values: list[Value], end: int) -> int:
    """Find by bisection the first of `end` rows that makes ``calculate(*values)`` fail."""
    first = 0
    while end - first > 1:
        middle = (first + end) // 2
        rows = slice(first, middle)
        try:
            calculate(*(value[rows] if isinstance(value, pa.Array) else value for value in values))
            first = middle
        except pa.ArrowInvalid:
            end = middle
    return first


def _alike(*values: Value) -> tuple[Value, ...]:
    """Convert arrays and constants of numbers to a common kind: floats, integers or decimals."""
    if any(pa.types.is_floating(value.type) for value in values):
        arrays = {value.type for value in values if isinstance(value, pa.Array)}
        numbers = [value.as_py() or 0 for value in values if isinstance(value, pa.Scalar)]
        is_single = arrays == {pa.float32()} and all(abs(n) <= _FLOAT32_MAX for n in numbers)
        values = tuple(map(_as_float64, values))
        return tuple(v.cast(pa.float32()) for v in values) if is_single else values
    if all(pa.types.is_integer(value.type) for value in values):
        return values
    scales = [getattr(value.type, "scale", 0) for value in values]
    pairs = zip(values, scales, strict=True)
    return tuple(pc.cast(value, pa.decimal256(DIGITS, scale)) for value, scale in pairs)


def _as_float64(value: Value) -> Value:
    if pa.types.is_decimal(value.type):
        value = pc.cast(value, pa.string())  # Arrow's cast from decimals rounds twice
    return pc.cast(value, pa.float64(), safe=False)


def _without_nan(value: Value) -> Value:
    if not pa.types.is_floating(value.type):
        return value
    return pc.if_else(pc.is_nan(value), pa.scalar(None, value.type), value)


def _as_time(text: Value, kind: pa.DataType) -> Value:
    """Parse texts as times of type `kind` or of a finer unit, in its zone if they name none."""
    text = text.cast(pa.string())
    if pa.types.is_time(kind):
        day = pc.binary_join_element_wise("1970-01-01", text, " ")
        return day.cast(pa.timestamp("ns")).cast(pa.time64("ns"))
    if not pa.types.is_timestamp(kind):
        return text.cast(kind)
    for unit in (kind.unit, "us", "ns"):
        for zone in dict.fromkeys((kind.tz, None)):
            try:
                time = text.cast(pa.timestamp(unit, zone))
            except pa.ArrowInvalid as err:
                reason = err
            else:
                return time if zone == kind.tz else pc.assume_timezone(time, kind.tz)
    raise reason


def _nanoseconds(value: Value) -> Value:
    """Convert dates, times or durations to nanoseconds, as decimals because many exceed int64."""
    kind = value.type
    number = value.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.int64())
    if pa.types.is_date(kind):
        factor = 86_400 * 10**9 if kind.bit_width == 32 else 10**6
    else:
        factor = _NANOSECONDS[kind.unit]
    return pc.multiply(number.cast(_WIDE), pa.scalar(factor, _WIDE))
