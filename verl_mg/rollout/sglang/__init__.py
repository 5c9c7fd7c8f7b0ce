"""SGLang as a rollout engine: `sglang.Engine` in a separate process, or a server at an address.

arguments         a layout and a device as SGLang's server arguments and environment
ports             ports of the engines on a machine
engine            an engine that this job starts: process, weights, memory
engine_process    the process of such an engine, and the handle with which its rank controls it
remote_engine     a server that the user has started, over HTTP
server_info       properties of such a server, compared with the job's requirements
request_tracker   requests in flight, of both kinds of engines
scheduler         SGLang's schedulers, adapted to the CPU
weight_loader     copies the shards into an engine's parameters, inside SGLang
ipc_payload       shards passed to an engine as one memory handle
tracing           weight tables read from SGLang's loaders
"""

from verl_mg.rollout.sglang.arguments import EngineSettings, check_on_cpu, engine_arguments
from verl_mg.rollout.sglang.engine import SGLangEngine

__all__ = ["EngineSettings", "SGLangEngine", "check_on_cpu", "engine_arguments"]
