"""Random conditions over columns of all types: the rows of a brute-force oracle, on every path.

The oracle evaluates a condition row by row with Python's integers, decimals and floats, and with
three-valued logic. DuckDB evaluates the conditions that mean the same in SQL.
"""

import datetime
import decimal
import functools
import math
import operator
import random
from decimal import Decimal
from typing import NamedTuple
from zoneinfo import ZoneInfo

import dask
import dask.dataframe as dd
import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from gpuclassify import Select
from gpuclassify.jobs.input.schema import to_pandas
from gpuclassify.jobs.task import CountedSelect

ROWS = 24
BERLIN = ZoneInfo("Europe/Berlin")
EXACT = decimal.Context(prec=200)
COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
INTEGERS = {
    "i8": pa.int8(),
    "u8": pa.uint8(),
    "u32": pa.uint32(),
    "i64": pa.int64(),
    "u64": pa.uint64(),
    "µ": pa.int16(),
}
FLOATS = {"half": pa.float16(), "single": pa.float32(), "f 64": pa.float64()}
OTHERS = {
    "money": pa.decimal128(9, 2),
    "wide": pa.decimal128(38, 0),
    "text": pa.string(),
    "view": pa.string_view(),
    "_quoted0": pa.bool_(),
    "day": pa.date32(),
    "seconds": pa.timestamp("s"),
    "nanos": pa.timestamp("ns"),
    "zoned": pa.timestamp("us", "Europe/Berlin"),
    "clock": pa.time64("us"),
    "nothing": pa.null(),
}
TYPES = INTEGERS | FLOATS | OTHERS
WORDS = ["", "a", "b", "Ä", "it's", '"', "€", "a`b"]
MOMENTS = ["2024-03-01", "2024-03-01 12:30:00.25", "2023-12-31T23:59:59", "2500-01-01"]


class Value(NamedTuple):
    """Expression: its words, its value for a row, and what it is."""

    words: str
    of: object  # a function of a row
    kind: str  # "integer", "decimal", "single", "double", or another
    is_constant: bool = False
    scale: int = 0  # of a decimal


def limits(kind):
    bits = kind.bit_width
    return (0, 2**bits - 1) if "u" in str(kind) else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def random_value(rng, name, kind):
    """Return a value of a column; small ones are frequent, so that comparisons meet."""
    if rng.random() < 0.15 or pa.types.is_null(kind):
        return None
    if pa.types.is_integer(kind):
        low, high = limits(kind)
        edges = [low, high, high - 1, 2**53, 2**53 + 1]
        number = rng.choice(edges) if rng.random() < 0.3 else rng.randint(-3, 4)
        return min(max(number, low), high)
    if pa.types.is_floating(kind):
        odd = [math.nan, math.inf, -math.inf, -0.0, 2.0**53, 2.0**63, 1e19, 0.1]
        return rng.choice(odd) if rng.random() < 0.4 else rng.randint(-8, 8) / 4
    moment = datetime.datetime(2024, 3, 1, 12, 30) + datetime.timedelta(hours=rng.randint(-60, 60))
    odd = datetime.datetime(2024, 3, 1, 12, 30, 0, 250_000)
    match name:
        case "money":
            return Decimal(rng.choice([0, 10, 25, 999_999_999, -300, 200])).scaleb(-2)
        case "wide":
            return Decimal(rng.choice([0, 1, 2**63, 2**64 - 1, 10**37 - 1, -(10**20)]))
        case "text" | "view":
            return rng.choice(WORDS)
        case "_quoted0":
            return rng.random() < 0.5
        case "day":
            return rng.choice([moment, datetime.datetime(2500, 1, 1)]).date()
        case "seconds":
            return rng.choice(
                [moment, datetime.datetime(2024, 3, 1), datetime.datetime(2500, 1, 1)]
            )
        case "nanos":
            return rng.choice([moment, odd])
        case "zoned":
            return rng.choice([moment, odd, datetime.datetime(2024, 3, 1)]).replace(tzinfo=BERLIN)
        case "clock":
            return rng.choice([moment, odd]).time()


def column(name):
    words = name if name.isidentifier() else f"`{name}`"
    kind = TYPES[name]
    if name in INTEGERS:
        return Value(words, lambda row: row[name], "decimal" if name == "u64" else "integer")
    if name in FLOATS:
        known = "double" if name == "f 64" else "single"
        return Value(words, lambda row: without_nan(row[name]), known)
    if pa.types.is_decimal(kind):
        return Value(words, lambda row: row[name], "decimal", False, kind.scale)
    return Value(words, lambda row: row[name], name)


def constant(value):
    if isinstance(value, float):
        kind = "double"
    else:
        kind = "integer" if value < 2**63 else "decimal"
    return Value(repr(value), lambda row: value, kind, True)


def without_nan(number):
    return None if number is None or math.isnan(number) else number


def as_single(number):
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def number(rng, depth):
    draw = rng.random()
    if depth == 0 or draw < 0.4:
        return column(rng.choice([*INTEGERS, *FLOATS, "money", "wide"]))
    if draw < 0.6:
        integers = [0, 1, 3, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 10**30]
        return constant(rng.choice([*integers, 0.1, 0.25, 2.0, 2.0**53, 2.0**63, 1e39, 1e19]))
    if draw < 0.7:
        inner = number(rng, depth - 1)
        return inner._replace(
            words=f"(-{inner.words})",
            of=lambda row: checked(inner.of(row), lambda x: -x, inner.kind, inner.scale),
        )
    return calculated(rng.choice("+-*/"), number(rng, depth - 1), number(rng, 0))


def calculated(sign, left, right):
    """Return left + right and the like, in the type that both share."""
    kinds = {left.kind, right.kind}
    scale = left.scale + right.scale if sign == "*" else max(left.scale, right.scale)
    is_constant = left.is_constant and right.is_constant
    columns = {part.kind for part in (left, right) if not part.is_constant}
    if kinds & {"single", "double"}:
        numbers = [part.of({}) for part in (left, right) if part.is_constant]
        is_single = columns == {"single"} and all(abs(n) < 3.4e38 for n in numbers)
        kind, scale = "single" if is_single else "double", 0
    else:
        kind = "integer" if kinds == {"integer"} else "decimal"
        if sign == "/":
            kind, scale = "double", 0

    def of(row):
        one, other = left.of(row), right.of(row)
        if one is None or other is None:
            return None
        if kind in ("integer", "decimal"):
            apply = {"+": operator.add, "-": operator.sub, "*": operator.mul}[sign]
            return checked(one, lambda number: apply(number, other), kind, scale)
        number = np.float32 if kind == "single" else np.float64
        with np.errstate(all="ignore"):
            one, other = number(one), number(other)
            apply = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[sign]
            return without_nan(float(apply(one, other)))

    return Value(f"({left.words} {sign} {right.words})", of, kind, is_constant, scale)


def checked(value, apply, kind, scale):
    if value is None:
        return None
    with decimal.localcontext(EXACT):
        result = apply(value)
        is_wide = kind == "decimal" and abs(result) >= Decimal(10) ** (37 - scale)
    if is_wide or (kind == "integer" and not -(2**63) <= result < 2**63):
        raise OverflowError(result)
    return result


def compare_numbers(sign, left, right):
    def of(row):
        one, other = left.of(row), right.of(row)
        if one is None or other is None:
            return None
        return COMPARE[sign](*comparable(left, one, right, other))

    return of


def comparable(left, one, right, other):
    floats = ("single", "double")
    if left.kind in floats and right.kind in floats:
        if left.kind == "single" and right.is_constant and abs(other) < 3.4e38:
            other = as_single(other)
        if right.kind == "single" and left.is_constant and abs(one) < 3.4e38:
            one = as_single(one)
    elif left.kind in floats and right.scale:
        other = float(other)
    elif right.kind in floats and left.scale:
        one = float(one)
    return one, other


def moment(words, name):
    """Return the text of a constant as Python has the values of a column."""
    time = datetime.datetime.fromisoformat(words)
    if name == "day":
        return time.date()
    return time.replace(tzinfo=BERLIN) if name == "zoned" and time.tzinfo is None else time


def comparison(rng):
    draw, sign = rng.random(), rng.choice([*COMPARE])
    if draw < 0.5:
        left, right = number(rng, 2), number(rng, 2)
        if left.is_constant:  # a condition names a column
            left = column(rng.choice([*INTEGERS, *FLOATS]))
        if draw < 0.1:
            third, last = number(rng, 1), rng.choice([*COMPARE])
            words = f"({left.words} {sign} {right.words} {last} {third.words})"
            first = compare_numbers(sign, left, right)
            second = compare_numbers(last, right, third)
            return words, lambda row: both(first(row), second(row))
        return f"({left.words} {sign} {right.words})", compare_numbers(sign, left, right)
    if draw < 0.6:
        tested = column(rng.choice([*TYPES]))
        is_not = rng.random() < 0.5
        words = f"({tested.words} is {'not ' * is_not}None)"
        return words, lambda row: (tested.of(row) is None) != is_not
    if draw < 0.7:
        tested = column(rng.choice([*INTEGERS, *FLOATS]))
        values = [constant(rng.choice([0, 1, 2, 2**64 - 1, 0.25, 0.1, 2.0])) for _ in range(3)]
        tests = [compare_numbers("==", tested, value) for value in values]
        is_not = rng.random() < 0.5
        listed = ", ".join(value.words for value in values)

        def is_in(row):
            met = functools.reduce(either, [test(row) for test in tests])
            return negated(met) if is_not else met

        return f"({tested.words} {'not ' * is_not}in [{listed}])", is_in
    if draw < 0.8:
        name = rng.choice(["text", "view"])
        word = rng.choice(WORDS)
        return f"({name} {sign} {word!r})", known(name, COMPARE[sign], word)
    if draw < 0.85:
        return "_quoted0", lambda row: row["_quoted0"]
    if draw < 0.9:
        return f"(nothing {sign} {rng.choice(['3', 'text', 'nothing', 'day'])})", lambda row: None
    if draw < 0.95:
        return f"(clock {sign} '12:30')", known("clock", COMPARE[sign], datetime.time(12, 30))
    name = rng.choice(["day", "seconds", "nanos", "zoned"])
    words = rng.choice(["2024-03-01", "2500-01-01"] if name == "day" else MOMENTS)
    if name == "zoned" and rng.random() < 0.5:
        words = f"{datetime.datetime.fromisoformat(words).isoformat()}+05:30"
    return f"({name} {sign} '{words}')", known(name, COMPARE[sign], moment(words, name))


def known(name, compare, other):
    return lambda row: None if row[name] is None else compare(row[name], other)


def both(one, other):
    if one is False or other is False:
        return False
    return None if one is None or other is None else True


def either(one, other):
    return negated(both(negated(one), negated(other)))


def negated(met):
    return None if met is None else not met


def condition(rng, depth, comparison=comparison):
    if depth == 0 or rng.random() < 0.25:
        return comparison(rng)
    left, of_left = condition(rng, depth - 1, comparison)
    if rng.random() < 0.25:
        return f"(not {left})", lambda row: negated(of_left(row))
    right, of_right = condition(rng, depth - 1, comparison)
    word, join = rng.choice([("and", both), ("or", either)])
    return f"({left} {word} {right})", lambda row: join(of_left(row), of_right(row))


def table_of(rng, types=TYPES):
    rows = [{n: random_value(rng, n, kind) for n, kind in types.items()} for _ in range(ROWS)]
    table = pa.Table.from_pylist(rows, schema=pa.schema([*types.items()]))
    return table, table.to_pylist()  # whose floats have the precision of their columns


def plain(table):
    """Return the table as a frame with the types that pandas itself gives."""
    dtypes = {pa.int8(): "Int8", pa.uint8(): "UInt8", pa.int16(): "Int16", pa.uint32(): "UInt32",
              pa.int64(): "Int64", pa.uint64(): "UInt64", pa.bool_(): "boolean"}  # fmt: skip
    return without_views(table).to_pandas(
        types_mapper=lambda kind: pd.array([], dtypes[kind]).dtype if kind in dtypes else None
    )


def without_views(table):
    """Return the table as readers of files give it."""
    views = [name for name in table.column_names if pa.types.is_string_view(table[name].type)]
    for name in views:
        place = table.column_names.index(name)
        table = table.set_column(place, name, table[name].cast("string"))
    return table


def lazily(where, frame):
    with dask.config.set({"dataframe.convert-string": False}):
        lazy = Select(where)(dd.from_pandas(frame, npartitions=3, sort=False))
    return lazy.compute(scheduler="sync").index.tolist()


PATHS = {
    "first stage": lambda where, table: np.flatnonzero(
        CountedSelect([Select(where)]).choose(without_views(table))
    ).tolist(),
    "later stage": lambda where, table: Select(where)(to_pandas(table)).index.tolist(),
    "pandas": lambda where, table: Select(where)(plain(table)).index.tolist(),
    "Arrow in pandas": lambda where, table: Select(where)(
        table.to_pandas(types_mapper=pd.ArrowDtype)
    ).index.tolist(),
    "Dask": lambda where, table: lazily(where, to_pandas(table)),
}


def check(seed, paths):
    rng = random.Random(seed)
    table, rows = table_of(rng)
    words, of = condition(rng, 3)
    try:
        expected = [number for number, row in enumerate(rows) if of(row) is True]
    except OverflowError:
        expected = OverflowError
    for path in paths:
        try:
            kept = PATHS[path](words, table)
        except OverflowError as err:
            assert "is too large" in str(err)
            kept = OverflowError
        assert kept == expected, (path, words)
    return expected


@pytest.mark.parametrize(
    ("seeds", "paths"),
    [
        (range(50), [*PATHS]),
        pytest.param(range(50, 3_000), [*PATHS][:-1], marks=pytest.mark.slow),
    ],
    ids=["some", "many"],
)
def test_rows_are_those_of_the_oracle_on_every_path(seeds, paths):
    results = [check(seed, paths) for seed in seeds]
    some = [kept for kept in results if kept is not OverflowError and 0 < len(kept) < ROWS]
    assert len(some) > len(seeds) / 2


# What means the same in SQL: integers that are small, fractions that are exact, and no division.
SQL_TYPES = {
    "n": pa.int64(),
    "x": pa.float64(),
    "text": pa.string(),
    "flag": pa.bool_(),
    "seconds": pa.timestamp("s"),
    "day": pa.date32(),
}
SQL_WORDS = {"==": "=", "None": "NULL", "[": "(", "]": ")", "is not": "IS NOT"}


def sql_value(rng, name):
    if rng.random() < 0.2:
        return None
    match name:
        case "n":
            return rng.randint(-3, 4)
        case "x":
            return math.nan if rng.random() < 0.2 else rng.randint(-8, 8) / 4
        case "flag":
            return rng.random() < 0.5
        case "text":
            return rng.choice(["", "a", "b", "Ä"])
    return random_value(rng, name, SQL_TYPES[name])


def sql_comparison(rng):
    sign, draw = rng.choice([*COMPARE]), rng.random()
    terms = ["n", "x", "n + x", "n * n - 2", "-x", "x * 0.5"]
    if draw < 0.4:
        return f"({rng.choice(terms)} {sign} {rng.choice([*terms, '1', '0.25', '-2'])})"
    if draw < 0.6:
        return f"({rng.choice([*SQL_TYPES])} is {rng.choice(['', 'not '])}None)"
    if draw < 0.7:
        return f"({rng.choice('nx')} {rng.choice(['', 'not '])}in [1, 0, -2])"
    moments = [f"seconds {sign} '2024-03-01 12:30:00'", f"day {sign} '2024-03-01'"]
    return rng.choice(["flag", f"(text {sign} 'a')", *(f"({words})" for words in moments)])


@pytest.mark.parametrize(
    "seeds",
    [range(25), pytest.param(range(25, 500), marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_rows_are_those_of_duckdb(seeds):
    for seed in seeds:
        rng = random.Random(seed)
        rows = [{name: sql_value(rng, name) for name in SQL_TYPES} for _ in range(ROWS)]
        table = pa.Table.from_pylist(rows, schema=pa.schema([*SQL_TYPES.items()]))
        words, _ = condition(rng, 3, lambda rng: (sql_comparison(rng), None))
        sql = words
        for word, other in SQL_WORDS.items():
            sql = sql.replace(word, other)
        known = table.append_column("row", pa.array(range(ROWS)))
        with duckdb.connect() as database:
            database.register("known", known)
            database.execute(
                "CREATE TABLE t AS SELECT * REPLACE (nullif(x, 'nan') AS x) FROM known"
            )
            found = database.execute(f'SELECT "row" FROM t WHERE {sql} ORDER BY 1').fetchall()
        for path in [*PATHS][:-1]:
            assert PATHS[path](words, table) == [row for (row,) in found], (path, words)
