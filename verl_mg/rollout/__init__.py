"""Rollout: the engine interface and its implementations.

engine                   interface: accepts requests, returns samples
hf/  sglang/             engines on transformers and on SGLang
tools/                   multi-turn generation with tools, around any engine
work_queue  engine_loop  distribution of requests over engines, and the loop of one engine
llm_judge                reward by a language model
"""

from verl_mg.rollout.engine import Request, RolloutEngine, Sample, Sampling

__all__ = ["Request", "RolloutEngine", "Sample", "Sampling"]
