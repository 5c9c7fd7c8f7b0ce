"""Errors that name the new module for imports of modules and names that have been renamed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

RENAMED_PACKAGES = {
    "recipes.pieces": "recipes.common",
    "verl_mg.job.checkpoints": "verl_mg.run",
    "verl_mg.job.ranks": "verl_mg.distributed",
    "verl_mg.job.records": "verl_mg.monitor",
    "verl_mg.job.samples": "verl_mg.monitor",
    "verl_mg.job.trackers": "verl_mg.monitor.trackers",
    "verl_mg.paper": "verl_mg.planner",
    "verl_mg.rollout.embedded": "verl_mg.engines.hf",
    "verl_mg.weights": "verl_mg.checkpoint, verl_mg.models or verl_mg.sharding",
    "verl_mg.weights.dialects": "verl_mg.sharding",
}
"""Packages of version 0.1.0 before their modules moved, and the packages that contain these now."""

RENAMED_MODULES = {
    "verl_mg.clock": "verl_mg.phase_timer",
    "verl_mg.job.checkpoints.contents": "verl_mg.run.job_state",
    "verl_mg.job.checkpoints.intact": "verl_mg.run.checkpointer",
    "verl_mg.job.checkpoints.own": "verl_mg.run.job_state",
    "verl_mg.job.checkpoints.saver": "verl_mg.run.checkpointer",
    "verl_mg.job.engines": "verl_mg.job.build_engines",
    "verl_mg.job.folder": "verl_mg.run.run_dir",
    "verl_mg.job.half": "verl_mg.run.mode",
    "verl_mg.job.lines": "verl_mg.jsonl",
    "verl_mg.job.loop": "verl_mg.run.loop",
    "verl_mg.job.networks": "verl_mg.job.build_models",
    "verl_mg.job.pace": "verl_mg.monitor.eta",
    "verl_mg.job.ranks.meeting": "verl_mg.distributed.rendezvous",
    "verl_mg.job.ranks.mpi": "verl_mg.distributed.rendezvous",
    "verl_mg.job.ranks.signals": "verl_mg.distributed.signals",
    "verl_mg.job.ranks.stacks": "verl_mg.distributed.watchdog",
    "verl_mg.job.ranks.watch": "verl_mg.distributed.watchdog",
    "verl_mg.job.ranks.world": "verl_mg.distributed.world",
    "verl_mg.job.records.books": "verl_mg.monitor.run_logger",
    "verl_mg.job.records.curve": "verl_mg.monitor.reward_curve",
    "verl_mg.job.records.observe": "verl_mg.monitor.rollout_metrics",
    "verl_mg.job.records.opening": "verl_mg.monitor.build_trackers",
    "verl_mg.job.records.profile": "verl_mg.monitor.profile",
    "verl_mg.job.records.status": "verl_mg.monitor.status",
    "verl_mg.job.records.summary": "verl_mg.monitor.summary",
    "verl_mg.job.records.throughput": "verl_mg.monitor.throughput",
    "verl_mg.job.records.timeline": "verl_mg.monitor.timeline",
    "verl_mg.job.records.torch_profile": "verl_mg.monitor.torch_profile",
    "verl_mg.job.replay": "verl_mg.run.replay",
    "verl_mg.job.samples.columns": "verl_mg.monitor.sample_writer",
    "verl_mg.job.samples.format": "verl_mg.monitor.sample_schema",
    "verl_mg.job.samples.recorded": "verl_mg.run.replay",
    "verl_mg.job.samples.recording": "verl_mg.monitor.sample_reader",
    "verl_mg.job.samples.writer": "verl_mg.monitor.sample_writer",
    "verl_mg.job.trackers.console": "verl_mg.monitor.trackers.console",
    "verl_mg.job.trackers.files": "verl_mg.monitor.trackers.files",
    "verl_mg.job.trackers.guarded": "verl_mg.monitor.trackers.retrying_tracker",
    "verl_mg.job.trackers.services": "verl_mg.monitor.trackers.services",
    "verl_mg.job.trackers.tensorboard": "verl_mg.monitor.trackers.tensorboard",
    "verl_mg.job.trackers.tracker": "verl_mg.monitor.trackers.tracker",
    "verl_mg.layout.contexts": "verl_mg.layout.dynamic_cp",
    "verl_mg.layout.dimensions": "verl_mg.layout.model_dims",
    "verl_mg.layout.engine": "verl_mg.layout.engine_layout",
    "verl_mg.layout.nearest": "verl_mg.layout.suggest",
    "verl_mg.megatron.collectives": "verl_mg.distributed.collectives",
    "verl_mg.megatron.configuration": "verl_mg.megatron.transformer_config",
    "verl_mg.megatron.cpu": "verl_mg.megatron.cpu_shim",
    "verl_mg.megatron.durable": "verl_mg.megatron.sharded_state",
    "verl_mg.megatron.groups": "verl_mg.megatron.process_groups",
    "verl_mg.megatron.guard": "verl_mg.training.update_guard",
    "verl_mg.megatron.host_adam": "verl_mg.megatron.streamed_adamw",
    "verl_mg.megatron.latent": "verl_mg.megatron.latent_attention",
    "verl_mg.megatron.linear": "verl_mg.megatron.layers",
    "verl_mg.megatron.norm": "verl_mg.megatron.layers",
    "verl_mg.megatron.ulysses": "verl_mg.megatron.attention",
    "verl_mg.megatron.snapshot": "verl_mg.megatron.storages",
    "verl_mg.megatron.network": "verl_mg.megatron.model_runner",
    "verl_mg.megatron.state": "verl_mg.megatron.storages",
    "verl_mg.named": "verl_mg.import_function",
    "verl_mg.paper.activations": "verl_mg.planner.memory",
    "verl_mg.paper.command": "verl_mg.planner.command",
    "verl_mg.paper.configured": "verl_mg.planner.from_config",
    "verl_mg.paper.cost": "verl_mg.planner.cost",
    "verl_mg.paper.iteration": "verl_mg.planner.iteration_time",
    "verl_mg.paper.lengths": "verl_mg.planner.lengths",
    "verl_mg.paper.measured": "verl_mg.planner.inputs",
    "verl_mg.paper.memory": "verl_mg.planner.memory",
    "verl_mg.paper.phases": "verl_mg.planner.memory_phases",
    "verl_mg.paper.report": "verl_mg.planner.report",
    "verl_mg.paper.roles": "verl_mg.planner.roles",
    "verl_mg.paper.search": "verl_mg.planner.search",
    "verl_mg.paper.setting": "verl_mg.planner.inputs",
    "verl_mg.paper.simulate": "verl_mg.planner.simulate",
    "verl_mg.paper.sync": "verl_mg.planner.iteration_time",
    "verl_mg.platform": "verl_mg.device",
    "verl_mg.reshard.check": "verl_mg.reshard.validate",
    "verl_mg.reshard.owners": "verl_mg.reshard.write_assignment",
    "verl_mg.reshard.portions": "verl_mg.reshard.chunking",
    "verl_mg.reshard.relation": "verl_mg.reshard.routing",
    "verl_mg.reshard.share": "verl_mg.reshard.aliasing",
    "verl_mg.reshard.stride": "verl_mg.reshard.engine_stride",
    "verl_mg.rewards.base": "verl_mg.rewards",
    "verl_mg.rewards.caller": "verl_mg.rewards.function_call_harness",
    "verl_mg.rewards.cases": "verl_mg.rewards.code",
    "verl_mg.rewards.form": "verl_mg.rewards.regex_format",
    "verl_mg.rewards.http": "verl_mg.http_client",
    "verl_mg.rewards.loading": "verl_mg.rewards",
    "verl_mg.rewards.math_worker": "verl_mg.rewards.math_pool",
    "verl_mg.rewards.math_workers": "verl_mg.rewards.math_pool",
    "verl_mg.rewards.panel": "verl_mg.rewards.async_scorer",
    "verl_mg.roles.agenda": "verl_mg.roles.concurrent",
    "verl_mg.roles.agreement": "verl_mg.distributed.collectives",
    "verl_mg.roles.asked": "verl_mg.rollout.pending_groups",
    "verl_mg.roles.exchange": "verl_mg.rows.dispatch",
    "verl_mg.roles.fleet": "verl_mg.rollout.engine_group",
    "verl_mg.roles.handed": "verl_mg.rollout.rollout_source",
    "verl_mg.roles.residence": "verl_mg.training.offload",
    "verl_mg.roles.revival": "verl_mg.rollout.engine_group",
    "verl_mg.roles.scorer": "verl_mg.roles.reward",
    "verl_mg.roles.server_fleet": "verl_mg.rollout.remote_engine_group",
    "verl_mg.roles.server_group": "verl_mg.weight_sync.remote",
    "verl_mg.roles.server_sync": "verl_mg.weight_sync.remote",
    "verl_mg.roles.sync": "verl_mg.weight_sync.engines",
    "verl_mg.roles.trained": "verl_mg.roles.trainable",
    "verl_mg.rollout.dealing": "verl_mg.rollout.work_queue",
    "verl_mg.rollout.embedded.decoding": "verl_mg.engines.hf.decoding",
    "verl_mg.rollout.embedded.engine": "verl_mg.engines.hf.engine",
    "verl_mg.rollout.embedded.kv_cache": "verl_mg.engines.hf.kv_cache",
    "verl_mg.rollout.embedded.sampling": "verl_mg.engines.hf.sampling",
    "verl_mg.rollout.judge": "verl_mg.engines.llm_judge",
    "verl_mg.engines.sglang.http": "verl_mg.http_client",
    "verl_mg.engines.sglang.loader": "verl_mg.engines.sglang.weight_loader",
    "verl_mg.engines.sglang.payload": "verl_mg.engines.ipc_payload",
    "verl_mg.engines.sglang.process": "verl_mg.engines.engine_process",
    "verl_mg.engines.sglang.server": "verl_mg.servers.remote_engine",
    "verl_mg.engines.sglang.tracer": "verl_mg.engines.tracing.tracer",
    "verl_mg.engines.sglang.tracing_rank": "verl_mg.engines.tracing.trace_rank",
    "verl_mg.rollout.shift": "verl_mg.rollout.engine_loop",
    "verl_mg.agents.tools.dialogue": "verl_mg.agents.tools.chat_format",
    "verl_mg.agents.tools.ready": "verl_mg.agents.tools.builtin",
    "verl_mg.agents.tools.turns": "verl_mg.agents.tools.multi_turn",
    "verl_mg.sandbox.cell": "verl_mg.sandbox.namespace_jail",
    "verl_mg.script": "verl_mg.api",
    "verl_mg.start": "verl_mg.run.main",
    "verl_mg.tiny": "verl_mg.models.tiny_model",
    "verl_mg.weights.adapters": "verl_mg.checkpoint.peft",
    "verl_mg.weights.anatomy": "verl_mg.models.hf_tensors",
    "verl_mg.weights.boxes": "verl_mg.sharding.boxes",
    "verl_mg.weights.catalogue": "verl_mg.models.tensor_index",
    "verl_mg.weights.coding": "verl_mg.engines.tracing.position_codes",
    "verl_mg.weights.dialects.megatron": "verl_mg.sharding.megatron",
    "verl_mg.weights.dialects.sglang": "verl_mg.sharding.sglang",
    "verl_mg.weights.dialects.transformers": "verl_mg.sharding.transformers",
    "verl_mg.weights.dialects.weight": "verl_mg.sharding.param_spec",
    "verl_mg.weights.files": "verl_mg.checkpoint.hf_safetensors",
    "verl_mg.weights.flops": "verl_mg.models.flops",
    "verl_mg.weights.header": "verl_mg.checkpoint.safetensors_header",
    "verl_mg.weights.holdings": "verl_mg.sharding.shard_map",
    "verl_mg.weights.model_config": "verl_mg.models.hf_config",
    "verl_mg.weights.parts": "verl_mg.checkpoint.sharded_safetensors",
    "verl_mg.weights.rules": "verl_mg.sharding.shard_rules",
    "verl_mg.weights.table": "verl_mg.sharding.weight_table",
    "verl_mg.weights.written": "verl_mg.sharding.traced_table",
}
"""Modules of version 0.1.0 before they were renamed, and the modules that replace them."""

RENAMED_NAMES = {
    "verl_mg.config.Section": "verl_mg.config.RecipeConfig",
    "verl_mg.megatron.microbatch.LossInputs": "verl_mg.training.loss_inputs.LossInputs",
    "verl_mg.megatron.microbatch.LossOutput": "verl_mg.training.loss_inputs.LossOutput",
    "verl_mg.megatron.microbatch.LossTokens": "verl_mg.training.loss_inputs.LossInputs",
    "verl_mg.rollout.judge.Judge": "verl_mg.engines.llm_judge.LLMJudge",
    "verl_mg.weights.read_config": "verl_mg.models.hf_config.read_config",
    "verl_mg.weights.table": "verl_mg.sharding.weight_table",
}
"""Classes and functions that documents of version 0.1.0 imported, and the names that replace them."""


class RenamedModuleFinder(MetaPathFinder):
    """Import hook, last in `sys.meta_path`: raises an error that names the new module for a renamed one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns an empty package for a former one, so that its modules are reported one by one."""
        if fullname in RENAMED_PACKAGES:
            return ModuleSpec(fullname, _EmptyPackageLoader(), is_package=True)
        message = _renamed(fullname)
        if message:
            # Without a name: the import system suppresses the error of a submodule with the requested name.
            raise ModuleNotFoundError(message)
        return None


def renamed_attribute(module: str, name: str) -> Exception:
    """Returns the error of a module's `__getattr__`, which names the new name if there is one."""
    new = RENAMED_NAMES.get(f"{module}.{name}")
    if new:
        # An AttributeError would be replaced by "cannot import name".
        return ImportError(f"{module}.{name}: renamed to {new}. Import the new name.")
    return AttributeError(f"module {module!r} has no attribute {name!r}")


class _EmptyPackageLoader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        """Executes nothing: the package is empty."""


def _renamed(name: str) -> str:
    """Returns the error for a former module, or ""."""
    if new := RENAMED_NAMES.get(name):
        return f"{name}: renamed to {new}. Import the new name."
    if new := RENAMED_MODULES.get(name):
        if not _exists(new):
            return f"{name}: moved to the package {new.rpartition('.')[0]}. Import it from there."
        return f"{name}: renamed to {new}. Import the new name."
    if new := RENAMED_PACKAGES.get(name.rpartition(".")[0]):
        return f"{name}: moved to {new}. Import it from there."
    return ""


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
