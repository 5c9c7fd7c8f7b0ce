"""`verl-mg eval`: evaluation of a model or of a run on sets of prompts, and comparison of two evaluations."""
