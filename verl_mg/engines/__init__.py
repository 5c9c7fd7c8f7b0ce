"""Rollout engines: one interface, engines on transformers, SGLang and vLLM, and the processes that they run in.

engine                   interface: accepts requests, returns samples
hf/  sglang/  vllm/      engines on transformers, on SGLang and on vLLM
tracing/                 sharding tables read from the loaders of engines
kinds                    one record for each kind of engine; engine_options: what one is started and run with
process_engine           an engine in a separate process, and its handle: requests, weights, memory, restart
engine_host              the main object in this process; ports: its ports
import_path/             what this process imports as this package
engine_attachment        where the next rank finds the process of a lost one
engine_nodes             an engine over several nodes
request_tracker          requests in flight of such engines and of servers
request_batch            requests in one message
payloads                 shards, or changes of them, passed to an engine as one memory handle
llm_judge                reward by a language model
"""

from verl_mg.engines.engine import Request, RolloutEngine, Sample, Sampling

__all__ = ["Request", "RolloutEngine", "Sample", "Sampling"]
