"""An environment for tests of engines, which repeats itself."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from rlhf_megatron.rollout.engine import Completion, EnvironmentReply


class Echo:
    """Environment that answers each of the model's turns that ends by a stop token with two tokens, up to so many
    turns."""

    ANSWER = (7, 8)

    def __init__(self, max_turns: int, repeatable: bool = False, answers: int | None = None) -> None:
        self.opens = False
        self.repeatable, self._max_turns, self._answers = repeatable, max_turns, answers
        self.asked: list[Completion] = []

    def goes_on(self, completion: Completion) -> bool:
        return completion.finish_reason == "stop" and completion.turns < self._max_turns

    def ask(self, completion: Completion) -> Future[Any]:
        self.asked.append(completion)
        future: Future[Any] = Future()
        future.set_result(self._answers is None or len(self.asked) <= self._answers)
        return future

    def read(self, completion: Completion, answer: Any, /) -> EnvironmentReply:
        return EnvironmentReply(list(self.ANSWER) if answer else None)
