"""Training backends' common part: micro-batches, log-probabilities, updates, offload, loading and export of weights."""
