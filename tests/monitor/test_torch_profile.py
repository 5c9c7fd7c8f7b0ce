"""torch's profiler on selected iterations and ranks."""

import gzip
import json

import pytest

from tests.run.short_jobs import GRPO, job
from verl_mg.config import ProfileConfig
from verl_mg.errors import UserError
from verl_mg.monitor.profile import TorchProfile, check_profile


def test_job_writes_traces_of_selected_iterations(ranks, inputs, tmp_path):
    chosen = ["profile.iterations=[2]", "profile.ranks=1", "job.iterations=2", "job.save=false"]
    ranks.run(2, job, "grpo", inputs, tmp_path / "run", [*GRPO, *chosen])
    assert [file.name for file in (tmp_path / "run" / "profile").iterdir()] == ["iteration-000002-rank-1.json.gz"]
    with gzip.open(tmp_path / "run" / "profile" / "iteration-000002-rank-1.json.gz") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names


def test_torch_profile_disk_error_warns(tmp_path, caplog):
    (tmp_path / "profile").write_text("")
    with TorchProfile(ProfileConfig(iterations=[1]), tmp_path, rank=0)(1):
        pass
    assert len(caplog.messages) == 1 and "no trace of iteration 1" in caplog.messages[0]


def test_torch_profile_exception_of_the_iteration_is_raised(tmp_path):
    with pytest.raises(KeyError), TorchProfile(ProfileConfig(iterations=[1]), tmp_path, rank=0)(1):
        raise KeyError
    assert not (tmp_path / "profile").exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ProfileConfig(ranks="0-4"), "profile.ranks=0-4: the job's ranks are 0 to 3"),
        (ProfileConfig(ranks="x"), "profile.ranks: ranks 'x'"),
        (ProfileConfig(iterations=[3, 101]), "profile.iterations: 101 is after the last one. Set 1 to 100"),
        (ProfileConfig(memory=True), "profile.memory=true: no iterations are set"),
        (ProfileConfig(memory=True, iterations=[1]), "profile.memory=true: only GPU memory"),
    ],
)
def test_check_profile_invalid_section_raises(config, words):
    with pytest.raises(UserError) as raised:
        check_profile(config, ranks=4, iterations=100)
    assert words in str(raised.value)


def test_check_profile_valid_section_passes():
    check_profile(ProfileConfig(ranks="0,2-3", iterations=[1, 100]), ranks=4, iterations=100)
