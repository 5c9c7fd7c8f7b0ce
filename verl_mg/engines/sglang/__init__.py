"""SGLang as a rollout engine: `sglang.Engine` in a separate process, or a server at an address.

arguments         a layout and a device as SGLang's server arguments and environment
engine            an engine that this job starts
host              the main object of such an engine's process
requests          requests and responses in SGLang's own fields
shard_receiver    receives the shards of a server's rank, inside SGLang; folder_receiver: reads changes of them
scheduler         SGLang's schedulers, adapted to the CPU; default_device: torch's default there
weight_loader     copies the shards into an engine's parameters, inside SGLang; marlin_weights: INT4 ones
unloaded_model    SGLang's model of a rank, for traces of its weight loader
"""

from verl_mg.engines.sglang.arguments import check_on_cpu, engine_arguments
from verl_mg.engines.sglang.engine import SGLangEngine

__all__ = ["SGLangEngine", "check_on_cpu", "engine_arguments"]
