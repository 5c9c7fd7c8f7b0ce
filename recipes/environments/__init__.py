"""Agents for environments of other projects, by servers or formats; `rollout.agent` has the name of the file."""
