"""An agent that asks a sum with the openai client, and once more where the answer is wrong, for rollout.agent.function.

recipes/tiny_agent.yaml trains the demo's model with it.
"""

from __future__ import annotations

import re
from typing import Any

import openai

NUMBER = re.compile(r"-?\d+")


async def run(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Return 1 for a right first answer, half of that for a second one."""
    messages = list(row["prompt"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for reward in (1.0, 0.5):
            answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=20)
            text = answer.choices[0].message.content or ""
            if row["ground_truth"] in NUMBER.findall(text)[-1:]:
                return reward
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "No. Once more?"}]
    return 0.0
