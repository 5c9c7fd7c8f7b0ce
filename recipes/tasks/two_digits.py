"""Agent that asks two questions one after another, for recipes with credit for single turns.

    python recipes/tasks/repeat_digit.py runs/repeat_digit
    torchrun --nproc-per-node 2 -m verl_mg train recipes/mt_grpo.py --config recipes/configs/two_digits_mt_grpo.yaml

The right answer to the prompt `ab=` is b three times, and to the second question, `a=`, it is a. The outcome is the
second answer, which does not depend on the first: only the first turn's own reward teaches it anything.
"""

from typing import Any

import httpx

from verl_mg.rewards import Reward

WIDTH = 3


async def run(session: Any, sample: Any) -> Reward:
    """Returns the share of right places in the second answer, and as the part `turn_1` the share in the first one.

    Args:
        session: URL and key of the policy, and the first question as messages.
        sample: the sample, whose record has the prompt.
    """
    first, second = sample.record["prompt"][1], sample.record["prompt"][0]
    messages, shares = list(session.messages), []
    # To verify certificates a client first reads all of the system's, which takes longer than a short reply.
    async with httpx.AsyncClient(timeout=None, verify=False) as client:
        for digit in (first, second):
            response = await client.post(
                f"{session.base_url}/chat/completions",
                headers={"Authorization": f"Bearer {session.api_key}"},
                json={"model": session.model, "messages": messages, "max_tokens": WIDTH},
            )
            response.raise_for_status()
            reply = response.json()["choices"][0]["message"]["content"] or ""
            shares.append(sum(written == digit for written in reply[:WIDTH]) / WIDTH)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"{second}="}]
    return Reward(shares[1], {"turn_1": shares[0]})
