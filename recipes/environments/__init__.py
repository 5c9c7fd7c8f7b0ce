"""Agents for environments of other projects, by servers or formats; `rollout.agent` names their `run`."""
