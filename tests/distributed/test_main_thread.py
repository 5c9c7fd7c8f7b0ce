"""Stack of the main thread, as the watchdog reports it."""

from verl_mg.distributed.stall_dump import innermost_user_frame, main_stack, main_waits


def test_main_stack_lists_innermost_frame_first():
    innermost, caller, *_ = main_stack()
    assert innermost.startswith("verl_mg/distributed/stall_dump.py:") and innermost.endswith(" _main_frame")
    assert caller.endswith(" main_stack")
    assert not main_waits()


def test_innermost_user_frame_skips_libraries():
    stack = ["lib/python3.11/threading.py:9 wait", "recipes/mine.py:3 iteration", "verl_mg/run/loop.py:5 run"]
    assert innermost_user_frame(stack) == "recipes/mine.py:3 in iteration"
    assert innermost_user_frame([]) == "an unknown line"
