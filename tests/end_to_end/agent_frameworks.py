"""An agent whose trajectories smolagents and verifiers play, unmodified, in an environment of their own.

``run`` is rollout.agent.function; it starts this file again with the Python that AGENT_FRAMEWORKS_PYTHON names.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from typing import Any

__all__ = ["Game", "Loop"]  # by which verifiers finds what its ids name


def run(base_url: str, api_key: str, row: dict[str, Any]) -> float:
    """Have a framework play a row, by its number; return what it says."""
    framework = "smolagents" if len(row["ground_truth"]) % 2 else "verifiers"
    environment = os.environ | {"AGENT_KEY": api_key, "AGENT_URL": base_url, "PYTHONPATH": os.path.dirname(__file__)}
    command = [os.environ["AGENT_FRAMEWORKS_PYTHON"], __file__, framework]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    reward = json.loads(done.stdout.strip().splitlines()[-1])
    with open(os.path.join(os.path.dirname(__file__), "frameworks.jsonl"), "a") as file:
        file.write(json.dumps([framework, reward]) + "\n")
    return float(reward["reward"])


def smolagents() -> dict[str, Any]:
    """Return a code agent of two steps; what a model without training writes is no code, which it is told."""
    from smolagents import CodeAgent, OpenAIServerModel
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    at = {"api_base": os.environ["AGENT_URL"], "api_key": os.environ["AGENT_KEY"]}
    model = OpenAIServerModel(model_id="policy", max_tokens=40, **at)
    templates = {
        **EMPTY_PROMPT_TEMPLATES,
        "system_prompt": "Write code.",
    }  # its own are longer than the test's model allows
    agent = CodeAgent(tools=[], model=model, max_steps=2, prompt_templates=templates, verbosity_level=0)  # type: ignore
    answer = agent.run("What is 2 + 3?")
    return {"reward": len(str(answer)) % 5 / 4, "steps": len(agent.memory.steps)}


def play_verifiers() -> dict[str, Any]:
    """Return a game of three turns of a verifiers task set, with its own loop as the program."""
    import verifiers.v1 as vf

    at = {"base_url": os.environ["AGENT_URL"], "api_key_var": "AGENT_KEY"}
    settings = vf.AgentConfig(
        model="policy",
        client=vf.EvalClientConfig(**at),
        harness=vf.HarnessConfig(id="agent_frameworks"),
        runtime=vf.SubprocessConfig(),
    )

    async def play() -> Any:
        async with vf.Agent(settings) as agent:
            (task,) = Game(vf.TasksetConfig(id="agent_frameworks"))
            return await agent.run(task)

    trace = asyncio.run(play())
    if trace.errors:
        raise RuntimeError(str(trace.errors[0])[:300])
    return {"reward": trace.reward, "branches": len(trace.branches)}


if (__name__ != "__main__" and "AGENT_URL" in os.environ) or sys.argv[1:] == ["verifiers"]:
    import openai
    import verifiers.v1 as vf
    from verifiers.v1.runtimes import ProgramResult

    class _Task(vf.Task[vf.TaskData]):
        @vf.reward
        async def length(self, trace: vf.Trace) -> float:
            """Reward a text whose length is even."""
            return float(len(trace.branches[-1].messages[-1].content or "") % 2 == 0)

    class Game(vf.Taskset[_Task, vf.TasksetConfig]):
        """One task."""

        def load(self) -> Any:
            """Yield it."""
            yield _Task(vf.TaskData(name="g", prompt="Guess a digit."), self.config.task)

    class Loop(vf.Harness[vf.HarnessConfig]):
        """Model, feedback, model."""

        EXECUTES_CODE, NEEDS_CONTAINER = False, False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> ProgramResult:
            """Ask through verifiers' own interception."""
            client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
            messages: list[Any] = [{"role": "user", "content": data.prompt}]
            rng = random.Random(1)
            for _ in range(3):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=20)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                messages.append({"role": "user", "content": rng.choice(["Higher.", "Lower."])})
            return ProgramResult(exit_code=0, stdout="", stderr="")


if __name__ == "__main__":
    print(json.dumps(smolagents() if sys.argv[1] == "smolagents" else play_verifiers()))
