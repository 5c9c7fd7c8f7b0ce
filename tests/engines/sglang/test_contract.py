"""What an engine on GPUs is started with, against the installed SGLang: its own functions, or its source."""

import ast
import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers import warm_start
from tests.helpers.internals import printed
from tests.helpers.traces import needs_sglang
from verl_mg import device
from verl_mg.config import Config
from verl_mg.engines import ports as ports_module
from verl_mg.engines.engine_options import AdapterSettings, EngineOptions
from verl_mg.engines.ports import BLOCK_SIZE, PortBlock
from verl_mg.engines.reports import ReportRules
from verl_mg.engines.sglang.arguments import engine_arguments, environment, place_arguments
from verl_mg.engines.sglang.host import _tags, parse_response
from verl_mg.engines.sglang.internals import DERIVED
from verl_mg.errors import UserError
from verl_mg.job.build_engines import engine_part, part_options
from verl_mg.layout import EngineLayout, EnginePlacement
from verl_mg.models.attention_config import IndexerConfig
from verl_mg.models.tiny_model import make_tiny_model

LIMITS = {"dtype": torch.bfloat16, "max_running": 16, "max_positions": 256}
ENGINES = {
    "tp2": EngineOptions(layout=EngineLayout(tp=2), **LIMITS),
    "first adp": EngineOptions(layout=EngineLayout(tp=4, ep=4, adp=2), first_gpu=0, routed_experts=True, **LIMITS),
    "second adp": EngineOptions(layout=EngineLayout(tp=4, ep=4, adp=2), first_gpu=4, routed_experts=True, **LIMITS),
    "pp2": EngineOptions(layout=EngineLayout(tp=2, pp=2), first_gpu=4, **LIMITS),
    "selections": EngineOptions(layout=EngineLayout(), selected_keys=True, **LIMITS),
    "deterministic": EngineOptions(layout=EngineLayout(tp=2), gpu_step=2, deterministic=True, **LIMITS),
    "adapters": EngineOptions(
        layout=EngineLayout(tp=2), sleeps=False, adapters=AdapterSettings(16, ("q_proj", "k_proj", "v_proj")), **LIMITS
    ),
    "awake": EngineOptions(layout=EngineLayout(), sleeps=False, **LIMITS),
    "float32": EngineOptions(layout=EngineLayout(), **LIMITS | {"dtype": torch.float32}),
}
PER_NODE = 8


@pytest.fixture(scope="module")
def blocks() -> Iterator[dict[str, PortBlock]]:
    """Ports of engines that run at the same time on a machine."""
    blocks = {name: PortBlock() for name in ENGINES}
    yield blocks
    for block in blocks.values():
        block.close()


@pytest.fixture(scope="module")
def arguments(tmp_path_factory, blocks) -> dict[str, dict[str, Any]]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", characters="abcdefgh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        made = {name: engine_arguments(model, settings) for name, settings in ENGINES.items()}
    meet = {name: f"127.0.0.1:{block.ports[1]}" for name, block in blocks.items()}
    return {name: place_arguments(ENGINES[name], blocks[name].ports, meet[name]) | one for name, one in made.items()}


@pytest.fixture(scope="module")
def sglang_says(arguments) -> dict[str, Any]:
    """See tests/engines/sglang/contract_probe.py; what is by engine has the engine's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        variables = environment(Path(), ENGINES["float32"])
    checked = " ".join(name for name in variables.keys() - os.environ.keys() if name.startswith("SGLANG_"))
    engines, environ = json.dumps([*arguments.values()]), variables | {"CHECKED": checked}
    said = printed(warm_start.sglang().python, "tests.engines.sglang.contract_probe", engines, env=environ)
    by_engine = ("refused", "ports", "resolved")
    return said | {key: dict(zip(arguments, said[key], strict=True)) for key in by_engine}


def test_environment_on_gpus_leaves_out_what_is_for_the_rank(on_gpus, monkeypatch):
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "/models")
    variables = environment(Path(), ENGINES["tp2"])
    assert variables["HF_HOME"] == "/models" and variables["PATH"] == os.environ["PATH"]
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS", "RANK"} & set(variables)


def test_environment_given_users_variable_keeps_it(on_gpus, monkeypatch):
    assert environment(Path(), ENGINES["tp2"])["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "true"
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "false")
    assert environment(Path(), ENGINES["tp2"])["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "false"


def test_environment_on_gpus_has_exact_kernels_in_float32_only(on_gpus):
    exact = {"SGLANG_FORCE_FUSED_OP_BACKEND": "torch", "TRITON_F32_DEFAULT": "tf32x3"}
    assert exact.items() <= environment(Path(), ENGINES["float32"]).items()
    assert not exact.keys() & environment(Path(), ENGINES["tp2"]).keys()


@needs_sglang
def test_environment_on_gpus_is_what_sglang_reads(sglang_says):
    assert sglang_says["variables"] == {
        "SGLANG_DISABLE_DSA_INDEXER_FUSION": True,
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": False,
        "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": False,
        "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
        "SGLANG_MEMORY_SAVER_CUDA_GRAPH": True,
        "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": False,
        "SGLANG_VLM_CACHE_SIZE_MB": 0,
    }
    # It reaches all operators that have 16 bits only.
    assert sglang_says["float32"] == {"triton": "tf32x3", "others": []}


@needs_sglang
def test_buffers_that_sglang_derives_from_weights_follow_an_update_in_place(sglang_says):
    """Kernels that fuse a norm with the sum of all ranks, or with a projection, read 1 + weight."""
    assert sglang_says["derived"] == {f"norm{end}": [4.0, 4.0] for end in DERIVED}


@needs_sglang
def test_sleep_releases_all_kinds_of_memory_that_sglang_has(sglang_says):
    assert set(_tags(weights=True, kv=True)) == set(sglang_says["tags"])


@needs_sglang
def test_engine_arguments_on_gpus_are_accepted_and_effective(sglang_says, arguments):
    for name, given in arguments.items():
        assert sglang_says["refused"][name] == []
        assert {key: sglang_says["resolved"][name][key] for key in given} == given


@needs_sglang
def test_engine_that_sleeps_has_no_graphs_whose_memory_stays(sglang_says):
    """SGLang refuses to release the memory of `breakable` graphs, which are its default for the prefill phase."""
    graphs = {name: resolved["graphs"] for name, resolved in sglang_says["resolved"].items()}
    assert graphs["awake"] == {"decode": "full", "prefill": "breakable"}
    assert all(graphs[name] == {"decode": "full", "prefill": "disabled"} for name in ENGINES if ENGINES[name].sleeps)


@needs_sglang
def test_place_arguments_of_engines_on_a_machine_are_disjoint(sglang_says, blocks):
    used = {}
    for name, ports in sglang_says["ports"].items():
        tcp = [int(address.rpartition(":")[2]) for address in ports["addresses"] if address.startswith("tcp:")]
        used[name] = {*tcp, ports["nccl_port"]}
        assert used[name] <= set(blocks[name].ports)
    # One address for each of SGLang's processes where attention is data-parallel.
    assert len(used["first adp"]) > 5
    addresses = [{*ports["addresses"], ports["nccl_port"]} for ports in sglang_says["ports"].values()]
    assert len(set(chain(*addresses))) == sum(map(len, addresses))


def test_port_block_used_by_another_job_is_left_to_it():
    first, second = PortBlock(), PortBlock()
    assert not set(first.ports) & set(second.ports)
    first.close()
    again = PortBlock()
    assert again.ports == first.ports
    second.close()
    again.close()


def test_port_block_with_a_port_in_use_is_left_out(monkeypatch):
    block = PortBlock()
    with socket.socket() as bound:
        bound.bind(("", block.ports[-1]))
        block.close()
        other = PortBlock()
        other.close()
    assert not set(other.ports) & set(block.ports)
    monkeypatch.setattr(ports_module, "PORTS", range(block.ports[0] - 1, block.ports[-1] + 1))
    taken = PortBlock()
    with pytest.raises(UserError, match=f"no {BLOCK_SIZE} consecutive ports"):
        PortBlock()
    taken.close()


def source_of(name: str) -> ast.Module:
    """A file of SGLang, which is not imported."""
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.origin
    return ast.parse((Path(spec.origin).parent / "srt" / name).read_text())


def gpu_formulas() -> list[Any]:
    """The expressions with which SGLang computes the GPU of a rank."""
    found = []
    for name in ("entrypoints/engine.py", "managers/data_parallel_controller.py"):
        assigned = [node for node in ast.walk(source_of(name)) if isinstance(node, ast.Assign)]
        (formula,) = [
            node.value
            for node in assigned
            if ast.unparse(node.targets[0]) == "gpu_id" and "gpu_id_step" in ast.unparse(node.value)
            and "compute_local_gpu_id" not in ast.unparse(node.value)
        ]  # fmt: skip
        found.append(compile(ast.Expression(formula), name, "eval"))
    return found


@cache
def rank_ranges() -> tuple[str, Any]:
    """Name and code of SGLang's function that gives the ranks of a node."""
    tree = source_of("entrypoints/engine.py")
    (found,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "_calculate_rank_ranges"]
    return found.name, compile(ast.Module([found], []), "engine.py", "exec")


def ranks_of_part(layout: EngineLayout, nodes: int, node: int) -> dict[str, Any]:
    """Ranks of stages and in a stage that SGLang places on a node, and how many there are, by its own function."""
    name, code = rank_ranges()
    parallel = SimpleNamespace(nnodes=nodes, pp_size=layout.pp, tp_size=layout.tp)
    names: dict[str, Any] = {"get_parallel": lambda: parallel, "Tuple": tuple}
    exec(code, names)
    return dict(zip(("pp", "tp", "pp_size_per_node", "tp_size_per_node"), names[name](node), strict=True))


def gpus_of(formula: Any, layout: EngineLayout, arguments: dict[str, Any]) -> dict[int, int]:
    """The GPU of each rank of an engine that is on the node of these arguments."""
    part = ranks_of_part(layout, arguments.get("nnodes", 1), arguments.get("node_rank", 0))
    device_arguments = SimpleNamespace(base_gpu_id=arguments["base_gpu_id"], gpu_id_step=arguments["gpu_id_step"])
    names = {"get_device": lambda: device_arguments, "base_gpu_id": 0, **part}
    return {
        pp * layout.tp + tp: eval(formula, names | {"pp_rank": pp, "tp_rank": tp})
        for pp in part["pp"]
        for tp in part["tp"]
    }


@pytest.fixture
def arguments_of(on_gpus, monkeypatch):
    """Arguments of the part of an engine that a rank of a job of two nodes starts."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2 * PER_NODE)
    monkeypatch.setattr(device, "ranks_of_a_node", lambda ranks: PER_NODE)
    monkeypatch.setattr(device, "total_memory", lambda: 2**37)
    sections = {"model": {"path": "model"}, "data": {"train": "none"}, "job": {"output": "run"}}
    config = Config.model_validate(sections | {"rollout": {"engine": "sglang"}})
    table = SimpleNamespace(config=SimpleNamespace(max_positions=256))

    def arguments_of(placement: EnginePlacement, rank: int) -> dict[str, Any]:
        monkeypatch.setattr(device, "current_device", lambda: torch.device("cuda", rank % PER_NODE))
        part = engine_part(placement, rank, PER_NODE)
        options = replace(EngineOptions.of_job(config, torch.bfloat16, table), layout=placement.layout)
        return engine_arguments(Path("model"), part_options(options, placement, part))

    return arguments_of


@needs_sglang
def test_engine_ranks_in_all_placements_are_on_the_gpus_that_sglang_takes(arguments_of):
    checked, formulas = 0, gpu_formulas()
    for layout in (EngineLayout(tp=tp, pp=pp) for tp in (1, 2, 4, 8, 16) for pp in (1, 2, 4, 8)):
        if layout.ranks > 2 * PER_NODE:
            continue
        for placement in EnginePlacement(layout, tuple(range(2 * PER_NODE))).strides(PER_NODE):
            placement.check_nodes(PER_NODE)
            for ranks in placement.members().values():
                firsts = [rank for rank in ranks if engine_part(placement, rank, PER_NODE)]
                assert firsts[0] == ranks[0] and len(firsts) == (1 if layout.ranks <= PER_NODE else 2)
                for formula in formulas:
                    found = {}
                    for rank in firsts:
                        gpus = gpus_of(formula, layout, arguments_of(placement, rank))
                        found |= {member: rank // PER_NODE * PER_NODE + gpu for member, gpu in gpus.items()}
                    assert found == dict(enumerate(ranks)), (str(layout), placement.stride)
                    checked += 1
    assert checked > 100


@pytest.mark.parametrize(("layout", "first"), [("tp8", 2), ("tp2-pp4", PER_NODE - 2)])
def test_check_nodes_given_an_engine_that_cannot_span_them_raises(layout, first):
    parsed = EngineLayout.parse(layout)
    with pytest.raises(UserError, match="needs as many ranks on each"):
        EnginePlacement(parsed, tuple(range(first, first + parsed.ranks))).check_nodes(PER_NODE)


@needs_sglang
def test_read_keys_of_what_sglang_reports_are_the_keys_with_the_highest_scores(on_gpus):
    layers, tokens, top_k, selecting = 4, 12, 3, (0, 1, 3)
    scores = torch.rand(layers, tokens, tokens, generator=torch.Generator().manual_seed(0))
    scores[2] = scores[1]  # which SGLang mirrors
    variables = environment(Path(), replace(ENGINES["tp2"], selected_keys=True))
    probe = "tests.engines.sglang.selections_probe"
    (text,) = printed(warm_start.sglang().python, probe, json.dumps(scores.tolist()), env=variables)
    meta = {"output_token_logprobs": [], "finish_reason": {"type": "stop"}, "indexer_topk": text}
    report = parse_response({"meta_info": meta, "output_ids": []}, 0)["selected_keys"]
    indexer = IndexerConfig(heads=1, head_dim=4, top_k=top_k, interleaved=True, sources=(0, 1, 1, 3))
    rules = ReportRules(engine="e", vocab=9, layers=layers, indexer=indexer)
    keys = rules.read_keys(7, report, tokens, True)
    for token, entries in enumerate(keys.entries.split(keys.sizes.tolist())):
        numbers = [int.from_bytes(bytes(entries[:, layer].tolist()), "little") for layer in range(len(selecting))]
        found = [[key for key in range(tokens) if number >> key & 1] for number in numbers]
        ranked = [sorted(range(token + 1), key=lambda key, at=layer: -scores[at, token, key]) for layer in selecting]
        assert found == ([sorted(own[:top_k]) for own in ranked] if token >= top_k else [[], [], []])
