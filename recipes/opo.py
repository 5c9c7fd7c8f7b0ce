"""OPO: on-policy RL with the optimal reward baseline (arXiv:2505.23585).

One exact on-policy update an iteration, neither clip nor KL, against the baseline of least gradient variance: the mean
reward of the group with responses weighed by their length.
"""

from recipes.common.penalties import scores, steered
from recipes.common.sampling import learn, roles, sample
from recipes.gpg import Config, policy_loss
from verl_mg.algorithms.advantages import opo
from verl_mg.job.job import Job

__all__ = ["Config", "iteration", "policy_loss", "roles"]


def iteration(job: Job, cfg: Config) -> dict[str, float]:
    cfg = steered(job, cfg)
    batch = sample(job, cfg)
    lengths, _ = batch.pad("loss_mask")
    advantages = opo(scores(batch, cfg), lengths.sum(1), batch["group"])
    batch["advantages"] = batch.expand_to_tokens(advantages) * batch["loss_mask"]
    return learn(job, cfg, batch, policy_loss)
