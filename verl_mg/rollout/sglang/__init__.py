"""SGLang as a rollout engine: `sglang.Engine` in a process of its own, or a server at an address.

arguments   a layout and a device as SGLang's server arguments
process     the host process: started, spoken to by lines of JSON, its log, its end
host        what runs inside it: `sglang.Engine`
requests    requests in, samples out, what is in flight: the part that engine and server have in common
engine      an engine of this job: its process, its weights, its memory
server      a server that somebody else has started: the same over HTTP
server_info what such a server tells of itself, and whether it fits
http        JSON to a server and back
scheduler   SGLang's schedulers, with what the CPU lacks
loader      how a pipeline stage takes its own of what all stages are handed
payload     shards handed over by the handles of their memory
tracer      what SGLang's own loaders make of a checkpoint, read off them
"""

from verl_mg.rollout.sglang.arguments import EngineSettings, check_on_cpu, engine_arguments
from verl_mg.rollout.sglang.engine import SGLangEngine

__all__ = ["EngineSettings", "SGLangEngine", "check_on_cpu", "engine_arguments"]
