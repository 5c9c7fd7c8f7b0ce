"""The parts of a job as a recipe sees them: actor, critic, reference, reward, teachers."""
