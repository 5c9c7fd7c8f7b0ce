"""Internals of SGLang that are used: the installed version has them."""

from pathlib import Path

import pytest

import verl_mg
from tests.helpers import warm_start
from tests.helpers.internals import missing_internals, printed
from tests.helpers.traces import needs_sglang
from verl_mg.engines import sglang

FOLDER = Path(sglang.__file__).parent


@needs_sglang
def test_internals_of_the_installed_sglang_are_all_there():
    assert missing_internals(warm_start.sglang().python, "sglang", *sorted(FOLDER.glob("*.py"))) == []


@needs_sglang
def test_internals_that_sglang_does_not_have_are_named_with_its_version(tmp_path):
    file = tmp_path / "internals.py"
    file.write_text(
        "from sglang.srt.environ import envs, nothing\nfrom sglang.srt.nowhere import it\n"
        "request('PauseGenerationReqInput', mode='retract', speed=2), request('NoReqInput')\n"
    )
    found = missing_internals(warm_start.sglang().python, "sglang", file)
    names = [line.partition(" has no ")[2].removeprefix("sglang.srt.") for line in found]
    assert names == ["environ.nothing", "nowhere.it", "PauseGenerationReqInput.speed", "managers.io_struct.NoReqInput"]
    assert all(line.startswith("sglang 0.") for line in found)


def test_internals_of_sglang_are_imported_in_one_file():
    files = [file for file in Path(verl_mg.__file__).parent.rglob("*.py") if "from sglang.srt" in file.read_text()]
    assert files == [FOLDER / "internals.py"]


@pytest.mark.nightly
@needs_sglang
def test_sampler_packs_as_many_candidates_as_a_step_has_at_most():
    fewer, more = printed(warm_start.sglang().python, "tests.engines.sglang.candidates_probe")
    assert fewer[1:] == [[2, 1], [0, 0]] and fewer[0][0] == [1, 3] and fewer[0][1][:1] == [1]
    assert more[1:] == [[3, 1], [0, 0]] and set(more[0][0]) == {0, 1, 3} and len(more[0][1]) == 3
