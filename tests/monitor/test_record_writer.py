"""The thread that writes records: order, what waits for it, and errors."""

import threading

import pytest

from verl_mg.monitor.record_writer import RecordWriter


def test_record_writer_writes_in_order_while_the_caller_continues():
    written, may_write = [], threading.Event()
    with RecordWriter() as writer:
        writer.write(lambda: may_write.wait(10) and written.append(1))
        writer.write(lambda: written.append(2))
        before = list(written)
        may_write.set()
        writer.flush()
        assert (before, written) == ([], [1, 2])


@pytest.mark.parametrize("error", [None, KeyError("of the iteration")])
def test_record_writer_at_the_end_has_written_all_also_after_an_exception(error):
    written = []
    try:
        with RecordWriter() as writer:
            for number in range(100):
                writer.write(lambda number=number: written.append(number))
            if error:
                raise error
    except KeyError as raised:
        assert raised is error
    assert written == list(range(100))


def test_record_writer_raises_the_first_error_in_the_next_flush_and_writes_on():
    written = []
    with RecordWriter() as writer:
        writer.write(lambda: {}["first"])
        writer.write(lambda: [][7])
        writer.write(lambda: written.append(3))
        writer.wait()
        with pytest.raises(KeyError, match="first"):
            writer.flush()
        writer.flush()
    assert written == [3]
