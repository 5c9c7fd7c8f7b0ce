import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from verl_mg.monitor.arrow_arrays import lists, maps, numbers, texts

ABSENT = np.array([False, True] * 10)
WORDS = ["", "né", None, "\n", "漢字"] * 4


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int32(), pa.int64(), pa.float32()], ids=str)
@pytest.mark.parametrize("absent", [None, ABSENT], ids=["all", "some"])
def test_numbers_equal_those_that_pyarrow_converts(kind, absent):
    values = np.arange(20) % 3
    array = numbers(values, kind, absent)
    array.validate(full=True)
    assert array.equals(pa.array(values, mask=absent).cast(kind))


@pytest.mark.parametrize("values", [WORDS, [], ["a", "b"]], ids=["some", "none", "all"])
def test_texts_equal_those_that_pyarrow_converts(values):
    array = texts(values)
    array.validate(full=True)
    assert array.equals(pa.array(values, pa.string()))


def test_lists_and_maps_equal_those_that_pyarrow_converts():
    lengths, words = [2, 0, 1], ["x", "y", "z"]
    array = lists(np.array(lengths), texts(words), np.array([False, True, False]))
    array.validate(full=True)
    assert array.equals(pa.array([["x", "y"], None, ["z"]], pa.list_(pa.string())))
    scores = maps(lengths, texts(words), numbers(np.array([1.0, 2.0, 3.0], np.float32)))
    scores.validate(full=True)
    pairs = [[("x", 1.0), ("y", 2.0)], [], [("z", 3.0)]]
    assert scores.equals(pa.array(pairs, pa.map_(pa.string(), pa.float32())))


def test_table_of_arrays_is_written_without_an_import_of_pandas(tmp_path):
    script = (
        "import sys; import numpy as np; import pyarrow as pa; from pyarrow import parquet\n"
        "from verl_mg.monitor.arrow_arrays import lists, maps, numbers, texts\n"
        "words, scores = texts(['a', None]), numbers(np.array([1.0, 2.0], np.float32))\n"
        "columns = {'words': words, 'list': lists([2, 0], words), 'map': maps([1, 1], texts(['a', 'b']), scores)}\n"
        f"parquet.write_table(pa.table(list(columns.values()), list(columns)), {str(tmp_path / 'rows')!r})\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
