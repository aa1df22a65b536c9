"""Partners that reply to the model: a user's function, tools, or an environment with a state, in processes with limits.

Here: jobs for the worker processes, and what their outcomes mean. Not here: tokens and rows (conversations.py), and the
calls themselves (rewards/user_function.py, user_tools.py, user_environment.py).
"""

from __future__ import annotations

import concurrent.futures
import re
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from rlhf_megatron.agents.program import AgentProgram
from rlhf_megatron.errors import RolloutError
from rlhf_megatron.recipe import MultiTurnSection, RolloutRecipe
from rlhf_megatron.rewards import user_environment as environment
from rlhf_megatron.rewards import user_tools, worker
from rlhf_megatron.rewards.answers import Message, Outcome
from rlhf_megatron.rewards.pool import Session, WorkerPool, bytes_of
from rlhf_megatron.rewards.sample_judges import unloadable
from rlhf_megatron.rewards.user_function import CONTEXT, TURN, Interface
from rlhf_megatron.untrusted import parse_json, shown

# One that has failed this often and has never once answered does not work.
HOPELESS_FAILURES = 8
# What an answer has beyond so many is not even tokenized, for which the engine would wait.
_CHARACTERS_PER_TOKEN = 64
# Of one tool, as the chat template gets it.
MOST_DESCRIPTION_CHARACTERS = 2**18
# Names are parts of metrics.
_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Trajectory(Protocol):
    """A partner's side of one row. Calls return at once."""

    def reset(self) -> Future[Outcome]:
        """Begin it; the outcome has messages that follow the prompt's."""
        ...

    def reply(self, messages: Sequence[dict[str, Any]], ending: str | None) -> Future[Outcome]:
        """Answer the last of ``messages``; ``ending``: why the model says nothing after it, TURNS or LENGTH."""
        ...

    def load(self, state: bytes) -> None:
        """Go on, in place of ``reset``, where the environment had this state; it does so when it is asked next."""
        ...

    def close(self) -> None:
        """End it; what was asked last may still go on."""
        ...


class Partner:
    """A user's function or environment, for one rank; its processes end with the rank.

    Attributes:
        context: what manages the conversation between turns, if anything does.
    """

    def __init__(self, section: MultiTurnSection, key: str, specification: str, job: worker.Job) -> None:
        """Load it; ``job`` says what it is. Raises RolloutError where that cannot be done."""
        self.key, self.specification = key, specification
        self.context: TurnFunction | None = None
        self._job = {"most": _CHARACTERS_PER_TOKEN * section.max_answer_tokens} | job
        memory = bytes_of(section.memory_limit_gb)
        self._pool = WorkerPool(section.workers, section.timeout_seconds, memory_bytes=memory, network=section.network)
        outcome = self._pool.submit(self._job | {"load_only": True}).result()
        if outcome.state != worker.DONE:
            self.close()
            raise RolloutError(unloadable(key, specification, outcome))
        self._returned = self._failures = 0

    def begin(self, row: dict[str, Any]) -> Trajectory:
        """Return its side of a row, which has prompt, data_source, ground_truth, extra_info, seed, and attempt."""
        raise NotImplementedError

    def messages_of(self, outcome: Outcome) -> list[Message] | None:
        """Return its reply; None where it failed. Raises RolloutError where it has only ever failed."""
        if outcome.state == worker.DONE:
            self._returned += 1
            return list(outcome.messages)
        self._failures += 1
        if outcome.state == worker.UNUSABLE:
            raise RolloutError(f"{self.key}: {outcome.message}")
        if not self._returned and self._failures >= HOPELESS_FAILURES:
            why = why_failed(outcome)
            raise RolloutError(f"{self.key}: it has failed {self._failures} times and never answered: {why}")
        return None

    def close(self) -> None:
        """End its processes."""
        self._pool.close()
        if self.context:
            self.context.close()


class TurnFunction(Partner):
    """A function of the conversation, without a state: calls go to any of its processes."""

    def __init__(self, section: MultiTurnSection) -> None:
        """See Partner."""
        assert section.function is not None
        self._load(section, TURN, section.function, {})

    def _load(self, section: MultiTurnSection, interface: Interface, function: str, job: worker.Job) -> None:
        Partner.__init__(self, section, interface.key, function, {"kind": worker.TURN, "function": function, **job})

    def begin(self, row: dict[str, Any]) -> Trajectory:
        """See Partner."""
        return _Calls(self, row)

    def call(
        self, messages: Sequence[dict[str, Any]], ground_truth: str, extra_info: dict[str, Any]
    ) -> Future[Outcome]:
        """Start the reply to a conversation; return at once."""
        given = {"messages": list(messages), "ground_truth": ground_truth, "extra_info": extra_info}
        return self._pool.submit(self._job | given)


class ContextFunction(TurnFunction):
    """A function of the conversation, whose messages take its place; where it has none the conversation stays."""

    def __init__(self, section: MultiTurnSection, most_tokens: int) -> None:
        """See Partner; ``most_tokens``: of a message."""
        assert section.context is not None
        self._load(section, CONTEXT, section.context, {"context": True, "most": _CHARACTERS_PER_TOKEN * most_tokens})


class _Calls:
    """Of a function; see Trajectory. It has no beginning and no end."""

    def __init__(self, function: TurnFunction, row: dict[str, Any]) -> None:
        self._function, self._row = function, row

    def reset(self) -> Future[Outcome]:
        """See Trajectory."""
        raise NotImplementedError

    def reply(self, messages: Sequence[dict[str, Any]], ending: str | None) -> Future[Outcome]:
        """See Trajectory."""
        return self._function.call(messages, self._row["ground_truth"], self._row["extra_info"])

    def load(self, state: bytes) -> None:
        """See Trajectory. There is no state beside the conversation."""

    def close(self) -> None:
        """See Trajectory."""


class TurnEnvironment(Partner):
    """A class whose instances have a state: one for each row, in a process of its own while the row lasts."""

    def __init__(self, section: MultiTurnSection, saves: bool = False) -> None:
        """See Partner; ``saves``: outcomes have its state, where it can be had."""
        assert section.environment is not None
        job = {"kind": worker.ENVIRONMENT, "environment": section.environment, "saves": saves}
        self._seconds, self._closing = section.timeout_seconds, set[Future[None]]()
        super().__init__(section, environment.INTERFACE.key, section.environment, job)

    def begin(self, row: dict[str, Any]) -> Trajectory:
        """See Partner."""
        return _Instance(self._pool.session(), self._job, row, self._closing)

    def close(self) -> None:
        """End its processes, as soon as the instances that are closing have closed."""
        concurrent.futures.wait(self._closing.copy(), self._seconds)
        super().close()


class _Instance:
    """One instance of an environment; see Trajectory."""

    def __init__(self, session: Session, job: worker.Job, row: dict[str, Any], closing: set[Future[None]]) -> None:
        self._session, self._job, self._row, self._closing = session, job, row, closing
        self._loaded: dict[str, Any] = {}

    def load(self, state: bytes) -> None:
        """See Trajectory."""
        self._loaded = {"row": self._row, "state": state}

    def reset(self) -> Future[Outcome]:
        """See Trajectory."""
        return self._session.submit(self._job | {"call": environment.RESET, "row": self._row})

    def reply(self, messages: Sequence[dict[str, Any]], ending: str | None) -> Future[Outcome]:
        """See Trajectory. An action that was cut off is none."""
        loaded, self._loaded = self._loaded, {}
        if ending == environment.LENGTH:
            return self._session.submit(self._job | loaded | {"call": environment.SCORE})
        step = loaded | {"call": environment.STEP, "action": messages[-1]["content"], "last": ending is not None}
        return self._session.submit(self._job | step)

    def close(self) -> None:
        """See Trajectory."""
        closing = self._session.end(self._job | {"call": environment.CLOSE})
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class TurnTools(Partner):
    """Functions and MCP servers that the model calls, for each row in a process of its own."""

    def __init__(self, section: MultiTurnSection, describes: bool = False) -> None:
        """See Partner; ``describes``: its first process gets the time to load what descriptions are made with, too."""
        servers = [server.model_dump() for server in section.tool_servers]
        job = {"kind": worker.TOOLS, "functions": section.tool_functions, "servers": servers}
        job |= {"call": user_tools.DESCRIBE} if describes else {}
        named = [*section.tool_functions, *(server.specification for server in section.tool_servers)]
        self._closing = set[Future[None]]()
        self.timeout_seconds = section.timeout_seconds
        super().__init__(section, user_tools.INTERFACE.key, ", ".join(named), job)

    def begin(self, row: dict[str, Any]) -> ToolCalls:
        """See Partner."""
        return ToolCalls(self._pool, self._job, self._closing)

    def describe(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates describe them. Raises RolloutError where that cannot be done."""
        session = self._pool.session()
        most = {"most": MOST_DESCRIPTION_CHARACTERS}
        outcome = session.submit(self._job | most | {"call": user_tools.DESCRIBE}).result()
        session.end(self._job | {"call": user_tools.CLOSE}).result()
        if outcome.state != worker.DONE:
            raise RolloutError(unloadable(self.key, self.specification, outcome))
        return [self._description(message["content"]) for message in outcome.messages]

    def _description(self, text: str) -> dict[str, Any]:
        """Return a tool as a server or a user's file describes it, of which nothing is believed."""
        tool = parse_json(text, f"{self.key}: a tool's description", RolloutError)
        name = tool["function"]["name"]
        if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
            raise RolloutError(
                f"{self.key}: the tool's name {shown(repr(name), 80)} is not of letters, digits, _, . and -"
            )
        return dict(tool)

    def close(self) -> None:
        """End its processes, as soon as the servers that are closing have closed."""
        concurrent.futures.wait(self._closing.copy(), self.timeout_seconds)
        super().close()


class ToolCalls:
    """The tools of one row; see Trajectory. What it is asked are calls, one after another."""

    def __init__(self, pool: WorkerPool, job: worker.Job, closing: set[Future[None]]) -> None:
        """Set up; no process is taken before the first call."""
        self._pool, self._job, self._closing = pool, job, closing
        self._session = pool.session()

    def call(self, name: str, arguments: dict[str, Any]) -> Future[Outcome]:
        """Start a call, behind those before it; return at once. Where a process has ended, another begins."""
        if self._session.has_ended:
            self.close()
            self._session = self._pool.session()
        return self._session.submit(self._job | {"call": user_tools.CALL, "name": name, "arguments": arguments})

    def reset(self) -> Future[Outcome]:
        """See Trajectory."""
        raise NotImplementedError

    def reply(self, messages: Sequence[dict[str, Any]], ending: str | None) -> Future[Outcome]:
        """See Trajectory; tool_turns.ToolTurns makes calls of a turn."""
        raise NotImplementedError

    def load(self, state: bytes) -> None:
        """See Trajectory. Functions have no state beside the conversation."""

    def close(self) -> None:
        """See Trajectory."""
        closing = self._session.end(self._job | {"call": user_tools.CLOSE})
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def make_partner(recipe: RolloutRecipe, leads: bool) -> Partner | AgentProgram | None:
    """Load who replies on a rank that ``leads`` a replica, where responses have several turns."""
    section = recipe.rollout.multi_turn
    if recipe.rollout.agent is not None and leads:
        return AgentProgram(recipe.rollout.agent, needs_reward=recipe.reward.rule == "none")
    if section is None or not leads:
        return None
    if section.tools:
        return TurnTools(section)
    partner = TurnFunction(section) if section.function else TurnEnvironment(section, recipe.keeps_journal)
    if section.context:
        try:
            partner.context = ContextFunction(section, recipe.data.max_prompt_length)
        except RolloutError:
            partner.close()
            raise
    return partner


def why_failed(outcome: Outcome) -> str:
    """Return why a call has no answer."""
    return outcome.message or f"no answer within rollout.multi_turn.timeout_seconds ({outcome.state})"
