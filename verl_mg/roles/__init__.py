"""The parts of a job as a recipe sees them: actor, reference, rollout."""
