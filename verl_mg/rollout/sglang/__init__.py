"""SGLang as a rollout engine: `sglang.Engine` in a process of its own, or a server at an address.

    arguments   a layout and a device as SGLang's server arguments
    process     the host process: started, spoken to by lines of JSON, its log, its end
    host        what runs inside it: `sglang.Engine`
    engine      requests in, samples out; what was unfinished when a process died
    server      the same for a server that somebody else has started
    payload     shards handed over by the handles of their memory
"""

from verl_mg.rollout.sglang.arguments import EngineSettings, check_on_cpu, engine_arguments
from verl_mg.rollout.sglang.engine import SGLangEngine

__all__ = ["EngineSettings", "SGLangEngine", "check_on_cpu", "engine_arguments"]
