"""A record is the same whatever file it comes from, as json, pandas, pyarrow and datasets write it today."""

import datetime
import json
import math
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import feather, parquet

from tests.helpers.json_lines import write_lines
from verl_mg.data import read_records
from verl_mg.errors import UserError

Rows = list[dict[str, Any]]


def tool(name: str, **kinds: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in kinds.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters, "tags": [name, None]}}


ROWS: Rows = [
    {
        "messages": [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5", "weight": 1}],
        "tools": [tool("weather", city="string"), tool("add", left="integer", right="integer")],
        "answer": 5,
        "source": "a",
        "scores": [0.5, None],
        "schema": '{"default": null}',
    },
    {
        "messages": [
            {"role": "user", "content": "ü\u2028"},
            {"role": "assistant", "content": None, "tool_calls": [{"arguments": {"left": 1}}]},
        ],
        "tools": None,
        "answer": None,
        "source": "b",
        "scores": [],
        "nothing": None,
    },
    {"messages": [{"role": "user", "content": "x"}], "tools": [], "answer": 7, "source": "a", "scores": [math.nan]},
]


def present(value: Any) -> Any:
    """What is left of a value without what is missing; the rule, written again."""
    if isinstance(value, dict):
        return {name: present(inner) for name, inner in value.items() if not is_missing(inner)}
    return [None if is_missing(x) else present(x) for x in value] if isinstance(value, list) else value


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def frame(rows: Rows) -> Any:
    import pandas

    table = pandas.DataFrame(rows, index=range(7, 7 + len(rows)))  # an index that Parquet files get as a column
    return table.astype({"source": "category"})


def dataset(rows: Rows) -> Any:
    import datasets

    # `from_list` takes the fields of the first row only: what it drops is in no file.
    names = dict.fromkeys(name for row in rows for name in row)
    return datasets.Dataset.from_list([{name: row.get(name) for name in names} for row in rows])


def with_json_columns(rows: Rows) -> Any:
    import datasets

    inferred = dataset(rows).features
    kinds = {"messages": datasets.List(datasets.Json()), "tools": datasets.Json(), "inner": datasets.Json()}
    columns = {name: [row.get(name) for row in rows] for name in inferred}
    features = datasets.Features({name: kinds.get(name, kind) for name, kind in inferred.items()})
    return datasets.Dataset.from_dict(columns, features=features)


def table(rows: Rows) -> pa.Table:
    """With the types that other libraries (Polars, DuckDB) write: large strings, views, dictionaries."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    plain = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    kinds = {"source": pa.dictionary(pa.int8(), pa.large_string()), "scores": pa.large_list(pa.float32())}
    kinds["schema"] = pa.string_view()
    # Only these columns: a cast of all fails in pyarrow 26 where fields of structs are null in all rows.
    columns = {name: plain[name].cast(kinds[name]) if name in kinds else plain[name] for name in names}
    return pa.table(columns)


def lines(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


WRITERS: dict[str, Callable[[Rows, Path], Any]] = {
    "json.jsonl": lambda rows, file: write_lines(file, rows),
    "list.json": lambda rows, file: lines(file, json.dumps(rows, indent=1)),
    "pandas.jsonl": lambda rows, file: frame(rows).to_json(file, orient="records", lines=True),
    "pandas.json": lambda rows, file: frame(rows).to_json(file, orient="records"),
    "pandas.parquet": lambda rows, file: frame(rows).to_parquet(file),
    "pandas.arrow": lambda rows, file: frame(rows).reset_index(drop=True).to_feather(file),
    "pyarrow.parquet": lambda rows, file: parquet.write_table(table(rows), file, row_group_size=2),
    "pyarrow.arrow": lambda rows, file: feather.write_feather(table(rows), file, compression="uncompressed"),
    "datasets.jsonl": lambda rows, file: dataset(rows).to_json(file),
    "datasets.json": lambda rows, file: dataset(rows).to_json(file, lines=False),
    "datasets.parquet": lambda rows, file: dataset(rows).to_parquet(file),
    "datasets": lambda rows, file: dataset(rows).save_to_disk(file),
    "json_columns.parquet": lambda rows, file: with_json_columns(rows).to_parquet(file),
    "json_columns": lambda rows, file: with_json_columns(rows).save_to_disk(file),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", WRITERS)
def test_read_records_of_any_writer_are_the_same(tmp_path, name):
    WRITERS[name](ROWS, tmp_path / name)
    assert read_records(tmp_path / name) == present(ROWS)


TEXTS = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5))
NUMBERS = st.one_of(st.none(), st.integers(-(2**40), 2**40))
OPTIONAL = st.fixed_dictionaries(
    {"role": st.just("r")}, optional={"a": TEXTS, "b": NUMBERS, "c": st.lists(st.one_of(st.none(), st.booleans()))}
)
RECORDS = st.fixed_dictionaries(
    {"source": st.sampled_from("ab")},
    optional={"text": TEXTS, "number": NUMBERS, "inner": OPTIONAL, "many": st.lists(OPTIONAL, max_size=3)},
)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=150, deadline=None)
@given(rows=st.lists(RECORDS, min_size=1, max_size=4), name=st.sampled_from(sorted(WRITERS)))
def test_read_records_of_generated_rows_are_the_same_for_any_writer(tmp_path_factory, rows, name):
    file = tmp_path_factory.mktemp("rows") / name
    try:
        WRITERS[name](rows, file)
    except pa.ArrowNotImplementedError:  # a struct without fields, which Parquet does not have
        return
    assert read_records(file) == present(rows)


ZEROS = int.from_bytes(b"0" * 16)
TIME = datetime.datetime(2026, 1, 31, 12)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pa.array([{"k": 1, "n": None}, None], pa.map_(pa.string(), pa.int64())), [{"k": 1}, None]),
        (pa.array([[{"k": [None]}], []], pa.list_(pa.map_(pa.string(), pa.list_(pa.int8())))), [[{"k": [None]}], []]),
        (pa.array([{"m": [(2, "x")]}], pa.struct({"m": pa.map_(pa.int64(), pa.string())})), [{"m": {"2": "x"}}]),
        (pa.array([Decimal("7.50"), Decimal("7.25")]), ["7.50", 7.25]),
        (pa.array([Decimal(12)]), [12]),
        (pa.array([TIME], pa.timestamp("ns")), ["2026-01-31T12:00:00"]),
        (pa.array([TIME], pa.timestamp("s", "UTC")), ["2026-01-31T12:00:00+00:00"]),
        (pa.array([TIME.date()]), ["2026-01-31"]),
        (pa.array([TIME.time()]), ["12:00:00"]),
        (pa.array([datetime.timedelta(seconds=90)]), ["0:01:30"]),
        (pa.array([1.5, math.nan], pa.float16()), [1.5, None]),
        (pa.array([[1.0, math.nan]]), [[1.0, None]]),
        (pa.nulls(2), [None, None]),
        (pa.array(["x", None]).dictionary_encode(), ["x", None]),
        (pa.array([{"bytes": b"\x00", "path": None}]), [{"bytes": b"\x00"}]),
        (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16))), [str(uuid.UUID(int=ZEROS))]),
    ],
)  # fmt: skip
def test_read_records_types_of_columns_are_values_of_json(tmp_path, column, values):
    parquet.write_table(pa.table({"x": column, "i": range(len(column))}), tmp_path / "data.parquet")
    expected = [{"i": i} if value is None else {"x": value, "i": i} for i, value in enumerate(values)]
    assert read_records(tmp_path / "data.parquet") == expected


NOT_TEXT = pa.array([b"a", b"b", b"\xff"]).view(pa.string())
TWICE = pa.array([[], [("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (pa.table({"y": [1, 2, 3], "x": NOT_TEXT}), r"data\.parquet:3: the field 'x' cannot be read \(.*utf-8"),
        (pa.table({"x": TWICE}), r"data\.parquet:2: the field 'x' cannot be read \('k'\)"),
        (pa.table({"x": pa.array([0, 2**62], pa.timestamp("ms"))}), r"data\.parquet:2: the field 'x' cannot be read"),
        (pa.Table.from_arrays([pa.array([1])] * 2, ["x", "x"]), r"data\.parquet: two columns have the name 'x'"),
    ],
)
def test_read_records_unreadable_value_is_named(tmp_path, content, reason):
    parquet.write_table(content, tmp_path / "data.parquet")
    with pytest.raises(UserError, match=reason):
        read_records(tmp_path / "data.parquet")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("data.json", '[{"a": 1}, 2]', r"data\.json:2: a JSON int, not an object"),
        ("data.json", '[{"a": 1},', r"data\.json: not JSON"),
        ("data.jsonl", '{"a": 1}\n{"b": {"a": 1, "a": 2}}\n', r"data\.jsonl:2: two fields of an object .* 'a'"),
    ],
)
def test_read_records_unreadable_json_is_named(tmp_path, name, text, reason):
    lines(tmp_path / name, text)
    with pytest.raises(UserError, match=reason):
        read_records(tmp_path / name)
