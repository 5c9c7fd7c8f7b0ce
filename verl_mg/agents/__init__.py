"""Agents: programs that act through an OpenAI- or Anthropic-compatible URL, whose turns become samples.

agent  --HTTP-->  server, protocols  --Call-->  session, renderer  --Request-->  rollout engine
"""
