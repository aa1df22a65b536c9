"""Plays episodes of verifiers' environments that verifiers_environment.py asks for, one line of JSON each.

The harness, which asks the model, is here: one request for each turn, without tools and without a program of its own.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from typing import Any

try:
    import aiohttp
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
except ImportError as failure:
    why = f"{failure}; VERIFIERS_PYTHON must name a Python with the package: pip install verifiers==0.4.0"
    print(json.dumps({"error": why}), flush=True)
    sys.exit(1)

__all__ = ["PolicyHarness"]


class PolicyHarness(vf.Harness[vf.HarnessConfig]):
    """Harness that asks the policy for its next turn, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Return one turn of the conversation so far."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages.extend(message_to_wire(message) for message in prompt or [])
        asked = {"model": ctx.model, "messages": messages}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{endpoint}/chat/completions", json=asked, headers=headers) as answer,
        ):
            # A task refuses further turns by an error, too; verifiers knows which is one.
            return vf.ProgramResult(exit_code=int(answer.status != 200), stdout="", stderr=await answer.text())


@functools.cache
def environment(taskset: str) -> vf.Env:
    """Return the environment of a taskset's configuration, for the policy in its one seat."""
    config = resolve_env_config({"taskset": json.loads(taskset)})
    seats = list(agent_config_fields(config))
    if len(seats) != 1:
        raise ValueError(f"{config.env_id} has the seats {', '.join(seats)}; the policy plays one alone")
    seat = {"harness": {"id": "verifiers-player"}, "runtime": {"type": "subprocess"}}
    return load_environment(resolve_env_config({"taskset": json.loads(taskset), seats[0]: seat}))


async def reward_of(asked: dict[str, Any]) -> float:
    """Play one episode; raises where verifiers says that it failed."""
    played = environment(json.dumps(asked["taskset"]))
    os.environ["POLICY_KEY"] = asked["api_key"]
    client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var="POLICY_KEY")
    tasks = list(played.taskset.include(idx=[asked["task"]]))
    if not tasks:
        raise ValueError(f"{played.config.env_id} has no task {asked['task']}; its seeds are the numbers of tasks")
    async with played.serving():
        episode = await played.run_episode(tasks[0], vf.ModelContext(model="policy", client=client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}" if errors else "the episode is not whole")
    return sum(trace.reward for trace in episode.traces)


def main() -> None:
    """Say that it is ready, then answer each line on stdin with one on stdout, which nothing else may print on."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"reward": asyncio.run(reward_of(json.loads(line)))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
