"""A taskset for verifiers: a sum, and a second try for half of the reward. recipes/tiny_verifiers.yaml trains on it."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["SumsEnv", "SumsTaskset"]
NUMBER = re.compile(r"-?\d+")


class SumData(vf.TaskData):
    """A question and its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """One sum."""

    def is_right(self, reply: str) -> bool:
        """Return True if the last number of a reply is the answer."""
        return NUMBER.findall(reply)[-1:] == [self.data.answer]


class SumsEnv(vf.Env[vf.SingleAgentEnvConfig]):
    """Environment that asks once more where the first answer is wrong."""

    async def run(self, task: SumTask, agents: vf.Agents) -> None:
        """Play one episode."""
        async with agents.agent.interaction(task) as interaction:
            segment, reward = await interaction.turn(), 1.0
            if not task.is_right(segment.last_reply):
                segment, reward = await interaction.turn("No. Try again."), 0.5
            right = not segment.terminated and task.is_right(segment.last_reply)
        interaction.trace.record_reward("right", reward * right)


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Sums of four digits, without end."""

    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        """Yield tasks, of which task i is the same in every run."""
        for index in itertools.count():
            chosen = random.Random(index)
            text = str(chosen.randint(0, 9))
            for _ in range(3):
                text += f" {chosen.choice('+-')} {chosen.randint(0, 9)}"
            question = f"State the final answer to the following arithmetic problem: {text} ="
            answer = sum(int(term) for term in NUMBER.findall(text.replace(" ", "")))
            yield SumTask(SumData(idx=index, prompt=question, answer=str(answer)), self.config.task)
