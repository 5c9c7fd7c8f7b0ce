"""Command-line agent that lets the policy repair its answer; needs nothing but Python, and runs in the sandbox.

    rollout:
      agent_command: [python, repair_agent.py]
      agent_options: {folder: tests/recipes/agents, show_answer: true}

It asks for the answer of the record, and once more where it is wrong, with the wrong answer and the prompt. Each reply
has the share of right places as its score. The reward is 1 for a right first answer, else the mean of the two scores.
"""

import json
import os
import urllib.request


def ask(messages: list[dict[str, str]], width: int) -> str:
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": width}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def score(reply: str, answer: str) -> float:
    return sum(written == right for written, right in zip(reply, answer, strict=False)) / len(answer)


def main() -> None:
    with open(os.environ["VERL_MG_SAMPLE"], encoding="utf-8") as file:
        sample = json.load(file)
    answer, messages = sample["answer"], sample["messages"]
    scores = []
    while len(scores) < 2 and (not scores or scores[-1] < 1):
        reply = ask(messages, len(answer))
        scores.append(score(reply, answer))
        print(f"turn {len(scores)}: {reply!r} has the score {scores[-1]:g}")
        wrong = {"role": "user", "content": f"{reply}\n{sample['messages'][-1]['content']}"}
        messages = [*messages, {"role": "assistant", "content": reply}, wrong]
    with open(os.environ["VERL_MG_REWARD"], "w", encoding="utf-8") as file:
        json.dump({"reward": sum(scores) / len(scores), "first": scores[0], "turns": len(scores)}, file)


if __name__ == "__main__":
    main()
