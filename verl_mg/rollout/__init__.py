"""Rollout: the engine interface and its implementations.

engine                   interface: accepts requests, returns samples
hf/  sglang/             engines on transformers and on SGLang
tools/                   multi-turn generation with tools, around any engine
process_engine           an engine in a process of its own: requests, weights, memory, restart
engine_process           the handle of this process; engine_host: the main object in it; ports: its ports
hidden_packages          packages of training that this process does not find
engine_attachment              where the next rank finds the process of a lost one; request_ledger: what it answers
request_tracker          requests in flight of such engines and of servers
ipc_payload              shards passed to an engine as one memory handle
work_queue  engine_loop  distribution of requests over engines, and the loop of one engine
llm_judge                reward by a language model
"""

from verl_mg.rollout.engine import Request, RolloutEngine, Sample, Sampling

__all__ = ["Request", "RolloutEngine", "Sample", "Sampling"]
