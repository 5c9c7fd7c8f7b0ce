"""A pair of real servers for prefill and decoding beside a server that does both: weights, answers, and a loss."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers.sglang_servers import RunningServer, free_port, ready, receiving_server
from tests.helpers.traces import needs_sglang
from tests.rollout.engine_jobs import checked_answers, engine_job, inputs, trained_once
from verl_mg.errors import UserError
from verl_mg.servers.paired_engine import PairedEngine, check_addresses, parts_of

pytestmark = needs_sglang
WITHOUT_CUDA = Path(__file__).parents[1] / "without_cuda"
needs_mooncake = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None,
    reason="Mooncake is not installed; run bash tools/install/mooncake_cpu.sh",
)


def test_addresses_of_pairs_are_read_and_checked():
    pair = "http://a:1/+http://b:2"
    assert parts_of(pair) == ["http://a:1", "http://b:2"] and parts_of("http://a:1/c+d") == ["http://a:1/c+d"]
    check_addresses([pair, "http://c:1"])
    with pytest.raises(UserError, match="http://b:2 is named twice"):
        check_addresses([pair, "http://b:2"])
    with pytest.raises(UserError, match="more than two parts"):
        check_addresses([pair + "+http://c:3"])


def test_fields_of_requests_of_pairs_are_those_of_sglang():
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    source = Path(folder, "srt", "managers", "io_struct.py").read_text()
    for field in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
        assert f"    {field}: " in source


@pytest.fixture
def servers(tmp_path, monkeypatch) -> Iterator[list[RunningServer]]:
    """Prefill, decode, and a server of both."""
    model = inputs(tmp_path, "qwen3") / "model"
    both = receiving_server(model, tmp_path / "both.log", "tp1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(WITHOUT_CUDA), os.environ.get("PYTHONPATH", "")]))
    common = {"disaggregation_transfer_backend": "mooncake_tcp", "cold": True}
    prefill = receiving_server(
        model, tmp_path / "prefill.log", "tp1",
        disaggregation_mode="prefill", disaggregation_bootstrap_port=free_port(), **common,
    )  # fmt: skip
    decode = receiving_server(
        model, tmp_path / "decode.log", "tp1",
        # The other way pins memory.
        disaggregation_mode="decode", disaggregation_decode_retraction_backup="cpu_tensor", **common,
    )  # fmt: skip
    with ready(prefill, decode, both) as running:
        yield running


SETTINGS = [
    "rollout.weight_transfer=shards",
    "actor.layout=tp2",
    # Few enough that each rank's servers get a part of the samples.
    "rollout.max_running_requests=4",
]


def train(folder: Path, urls: str, prefill: int) -> list[dict[str, object]]:
    sent = []
    fields_of = PairedEngine.bootstrap_fields

    def counted(engine: PairedEngine) -> dict[str, object]:
        sent.append(fields_of(engine))
        return sent[-1]

    job, recipe = engine_job(folder, f"rollout.urls=[{urls}]", *SETTINGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairedEngine, "bootstrap_fields", counted)
        reported = [trained_once(job, recipe, folder, "first")]
    reported[0]["sent"] = sent
    reported[0]["servers"] = job.rollout.metrics["rollout/servers"]
    if dist.get_rank() == 0:
        os.killpg(prefill, 9)
    reported.append(trained_once(job, recipe, folder, "second"))
    reported[1]["servers"] = job.rollout.metrics["rollout/servers"]
    job.close()
    return reported


@needs_mooncake
@pytest.mark.nightly
def test_pair_receives_weights_answers_and_is_lost_as_one(ranks, tmp_path, servers):
    prefill, decode, both = servers
    results = ranks.run(2, train, tmp_path, f"{prefill.url}+{decode.url},{both.url}", prefill.pid)
    first, second = zip(*results, strict=True)
    received, bound = first[0]["sync"]
    assert received == bound and (first[0]["servers"], second[0]["servers"]) == (3, 1)
    rooms = [fields["bootstrap_room"] for rank in first for fields in rank["sent"]]
    assert rooms and len(set(rooms)) == len(rooms) and all(0 <= room < 2**63 for room in rooms)
    assert len(checked_answers(tmp_path, first)) == 5
    assert all(rank["mismatch"] < 1e-4 for rank in first)
    assert len(checked_answers(tmp_path, second)) == 5
    assert all(rank["ids"] for rank in first) and second[0]["grad_norm"] > 0
