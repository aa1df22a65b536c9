"""Multi-turn responses: a user function replies between the model's turns, in processes with a time limit.

The rank that leads a replica calls it; the reply goes through the chat template, and its tokens are appended to the
model's, marked as not sampled (``rollout.scheduler``).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.errors import DataError
from rlhf_megatron.generation.prompt_groups import Group, turns_of_model
from rlhf_megatron.recipe import MultiTurnSection, RolloutRecipe
from rlhf_megatron.rewards import worker
from rlhf_megatron.rewards.answers import Message, Outcome
from rlhf_megatron.rewards.judges import unloadable
from rlhf_megatron.rewards.pool import WorkerPool, bytes_of
from rlhf_megatron.rollout.engine import Completion, RolloutError

# A function that has failed this often and has never once answered does not work.
HOPELESS_FAILURES = 8
KEY = "rollout.multi_turn.function"
# What an answer has beyond so many is not even tokenized, for which the engine would wait.
_CHARACTERS_PER_TOKEN = 64


@dataclasses.dataclass
class TurnCounts:
    """Outcomes of one replica's calls of the function."""

    answers: int = 0
    ended: int = 0  # by the function
    failed: int = 0


class TurnFunction:
    """The user's function, for one rank; its processes end with the rank."""

    def __init__(self, section: MultiTurnSection) -> None:
        """Loads it. Raises RolloutError where that cannot be done."""
        self._function, self._section = section.function, section
        self._pool = WorkerPool(
            section.workers, section.timeout_seconds, memory_bytes=bytes_of(section.memory_limit_gb)
        )
        outcome = self._pool.submit(self._job() | {"load_only": True}).result()
        if outcome.state != worker.DONE:
            self.close()
            raise RolloutError(unloadable(KEY, self._function, outcome))
        self._returned = self._failures = 0

    def _job(self) -> worker.Job:
        return {"kind": worker.TURN, "function": self._function}

    def call(
        self, messages: Sequence[dict[str, Any]], ground_truth: str, extra_info: dict[str, Any]
    ) -> Future[Outcome]:
        """Starts the reply to a conversation; returns at once."""
        most = _CHARACTERS_PER_TOKEN * self._section.max_answer_tokens
        given = {"messages": list(messages), "ground_truth": ground_truth, "extra_info": extra_info, "most": most}
        return self._pool.submit(self._job() | given)

    def messages_of(self, outcome: Outcome) -> list[Message] | None:
        """Returns its reply; None where it failed. Raises RolloutError where it has only ever failed."""
        if outcome.state == worker.DONE:
            self._returned += 1
            return list(outcome.messages)
        self._failures += 1
        if outcome.state == worker.UNUSABLE:
            raise RolloutError(f"{KEY}: {outcome.message}")
        if not self._returned and self._failures >= HOPELESS_FAILURES:
            why = outcome.message or f"no answer within rollout.multi_turn.timeout_seconds ({outcome.state})"
            raise RolloutError(f"{KEY}: it has failed {self._failures} times and never answered: {why}")
        return None

    def close(self) -> None:
        """Ends its processes."""
        self._pool.close()


def make_turn_function(recipe: RolloutRecipe, leads: bool) -> TurnFunction | None:
    """Loads the user's function on a rank that ``leads`` a replica, where responses have several turns."""
    section = recipe.rollout.multi_turn
    return TurnFunction(section) if section and leads else None


class Conversations:
    """The turns of one generation of a replica; ``rollout.engine.Environment``."""

    def __init__(
        self,
        section: MultiTurnSection,
        function: TurnFunction | None,
        groups: Sequence[Group],
        responses_per_prompt: int,
        tokenizer: Tokenizer,
        repeatable: bool,
    ) -> None:
        """Row ``i * responses + k`` is response k to the prompt of group i. ``function`` is on the rank that leads.
        ``repeatable`` as in Environment.

        Raises RolloutError where the chat template does not say where a turn of the model's ends.
        """
        self._section, self._function, self._tokenizer = section, function, tokenizer
        self._groups, self._responses, self.repeatable = groups, responses_per_prompt, repeatable
        end = tokenizer.turn_end_token()
        if end is None:
            raise RolloutError(
                "rollout.multi_turn: the chat template puts no control token after an assistant's turn; give one that "
                "does, by data.chat_template"
            )
        self._end = end
        self._answers: dict[int, list[list[Message]]] = defaultdict(list)  # by row, then by the turn that it follows
        self.counts = TurnCounts()

    def goes_on(self, completion: Completion) -> bool:
        """See Environment."""
        return completion.token_ids[-1] == self._end and completion.turns < self._section.max_assistant_turns

    def ask(self, completion: Completion) -> Future[Any]:
        """See Environment."""
        assert self._function is not None, "only the rank that leads asks"
        prompt = self._groups[completion.row_id // self._responses].prompt
        return self._function.call(
            [*prompt.messages, *self.messages(completion)], prompt.ground_truth, prompt.extra_info
        )

    def read(self, completion: Completion, outcome: Outcome) -> list[int] | None:
        """See Environment. Raises RolloutError where the function does not work, or the template refuses its reply."""
        assert self._function is not None, "only the rank that leads asks"
        messages = self._function.messages_of(outcome)
        if not messages:
            self.counts.failed += messages is None
            self.counts.ended += messages is not None
            return None
        cut = [message | {"content": self._cut(message["content"])} for message in messages]
        try:
            tokens = self._tokenizer.encode_next_turn(cut)
        except DataError as error:
            raise RolloutError(f"{KEY}: its reply is refused: {error}") from error
        self._answers[completion.row_id].append(cut)
        self.counts.answers += 1
        return tokens

    def messages(self, completion: Completion) -> list[Message]:
        """The messages after the prompt, on the leading rank, without a reply that did not fit."""
        own = [{"role": "assistant", "content": text} for text in turns_of_model(completion, self._tokenizer)]
        # Nobody has answered the last one yet, or nobody will.
        answers = [*self._answers[completion.row_id][: len(own) - 1], []]
        return [message for turn, replies in zip(own, answers, strict=True) for message in (turn, *replies)]

    def _cut(self, text: str) -> str:
        tokens, most = self._tokenizer.encode(text), self._section.max_answer_tokens
        return text if len(tokens) <= most else self._tokenizer.decode(tokens[:most], skip_special_tokens=False)
