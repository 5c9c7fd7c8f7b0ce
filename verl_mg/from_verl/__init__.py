"""`verl-mg from-verl`: a configuration of verl's PPO trainer as one of ours, for a job that means the same.

    file, script, overrides ── reading.py ──▶ values by key of verl     {"aorr.actor.clip_ratio_high": 0.28, ...}
      what a file leaves out ── defaults.yaml ──┘
                                       table.py ──▶ values by our key   {"algorithm.clip_high": 0.28, ...}
                                     remarks.py ──▶ what has no counterpart, a line for each
                                   translate.py ──▶ checked configuration of a recipe

Keys have the names of verl 0.9.1, with `aorr` for `actor_rollout_ref`; reading.py knows older names.
"""
