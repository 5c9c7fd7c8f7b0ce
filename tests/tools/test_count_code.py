"""tools/docs/count_code.py: figures of a tree."""

import pytest

from tools.docs.count_code import OTHER_ROUTES, counts


@pytest.mark.parametrize("above", OTHER_ROUTES)
def test_files_that_a_key_passes_do_not_depend_on_the_folder_of_the_tree(tmp_path, above):
    tree = tmp_path / above / "checkout"
    for place in ("verl_mg/actor.py", "verl_mg/planner/memory.py"):
        (tree / place).parent.mkdir(parents=True, exist_ok=True)
        (tree / place).write_text("recompute = True\n")
    assert counts(tree)["files that actor.recompute passes"] == 1
