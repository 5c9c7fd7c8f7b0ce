"""Agents for environments of other projects, by their servers or formats; `rollout.agent` names their `run`.

openenv    servers of OpenEnv, by WebSocket
harbor     task folders of Harbor, in the sandbox or in Docker
verifiers  environments of verifiers, by a server in their environment
nemo_gym   agent servers of NeMo Gym
"""
