"""Answers of a worker process. It has run a function of others, so the rank believes nothing but the right form.

Each job of a batch has a nonce, and only an answer that repeats it, once, is that job's. Anything else that comes from
a worker is a ``BadAnswer``: it has to be ended (pool.py), and what it has not answered is lost with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.errors import UserError
from rlhf_megatron.rewards.user_function import LARGEST_SCORE, MOST_MESSAGES, MOST_ROLE_CHARACTERS
from rlhf_megatron.rewards.worker import (
    AGENT,
    CODE,
    DONE,
    ENVIRONMENT,
    FAILED,
    STARTED,
    TIMED_OUT,
    TOOLS,
    TURN,
    UNUSABLE,
    Job,
)
from rlhf_megatron.untrusted import parse_json, shown

# One line: a score or the text of an error; and the messages of a turn.
MOST_LINE_BYTES = 2**16
MOST_TURN_BYTES = 2**26
MOST_MESSAGE_CHARACTERS = 1000

Message = dict[str, str]

_OF_TURNS = (TURN, ENVIRONMENT, AGENT, TOOLS)


class BadAnswer(UserError):
    """A worker's message that is no answer to what it was asked."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one job: state DONE with a score, FAILED or UNUSABLE with a message, TIMED_OUT or DIED.

    Of a job that answers a turn and is DONE, ``messages`` are the next ones of the conversation, ``score`` is the
    reward of what they answer, and nothing follows if it ``ends``; ``saved`` is the environment's state, as text in
    base64, if it was asked for. Of a program that is DONE, ``ends`` says that it gave a ``score``.

    ``awaited`` is the answer to a job that only loads: whether several of its kind can be done together.

    ``is_transient`` says of a failure that another attempt may not meet it, as where a service was away.
    """

    state: str
    score: float = 0.0
    message: str = ""
    awaited: bool = False
    messages: tuple[Message, ...] = ()
    ends: bool = False
    saved: str | None = None
    is_transient: bool = False


class Batch:
    """Jobs that a worker does together, and what it has answered.

    Attributes:
        jobs: what it is sent, each with its nonce.
        outcomes: by index in ``jobs``.
        awaited: whether the jobs are awaited together; None until the worker has loaded what does them.
        most_bytes: of one line of its answers.
        ends_itself: the worker ends a job that is late, if what it runs lets it.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        """Give each job a nonce that nobody can guess."""
        self.jobs = [{**job, "nonce": secrets.token_hex(16)} for job in jobs]
        self.outcomes: dict[int, Outcome] = {}
        self.awaited: bool | None = None
        self.most_bytes = MOST_TURN_BYTES if any(job["kind"] in _OF_TURNS for job in jobs) else MOST_LINE_BYTES
        self.ends_itself = any(job["kind"] in (ENVIRONMENT, AGENT, TOOLS, CODE) for job in jobs)
        self._open = {job["nonce"]: index for index, job in enumerate(self.jobs)}

    @property
    def is_done(self) -> bool:
        """True if every job has its outcome."""
        return not self._open

    def take(self, line: bytes) -> None:
        """Read one line of the worker's.

        Raises:
            BadAnswer: it is not the next answer to any job that is open.
        """
        answer = parse_json(line, "an answer", BadAnswer, most_levels=4)
        if not isinstance(answer, dict):
            raise BadAnswer(f"{type(answer).__name__} instead of an object")
        nonce, state = answer.pop("nonce", None), answer.pop("state", None)
        if not isinstance(nonce, str) or nonce not in self._open:
            raise BadAnswer("it answers no job that is open")
        index = self._open[nonce]
        if state == STARTED:
            if self.awaited is not None or index != 0:
                raise BadAnswer("it started twice")
            self.awaited = _content(answer, "awaited", bool)
            return
        if state not in (FAILED, UNUSABLE) and self.awaited is None:
            raise BadAnswer(f"state {shown(state, 20)!r} before it started")
        self.outcomes[index] = _outcome(state, answer, self.jobs[index])
        del self._open[nonce]


def _outcome(state: Any, content: dict[str, Any], job: Job) -> Outcome:
    if state in (FAILED, UNUSABLE):
        return Outcome(state, message=shown(_content(content, "message", str), MOST_MESSAGE_CHARACTERS))
    if state == TIMED_OUT and not content:
        return Outcome(TIMED_OUT)
    if state != DONE:
        raise BadAnswer(f"the state {shown(state, 20)!r}")
    if job.get("load_only"):
        return Outcome(DONE, awaited=_content(content, "awaited", bool))
    if job["kind"] in _OF_TURNS:
        ends, saved = content.pop("done", None), content.pop("saved", None)
        if saved is not None and not (job.get("saves") and isinstance(saved, str)):
            raise BadAnswer("a state that was not asked for, or is no text")
        if type(ends) is not bool or "messages" not in content:
            raise BadAnswer("it does not hold messages, reward and done")
        messages = _messages(_content({"messages": content.pop("messages")}, "messages", list), job["most"])
        return Outcome(DONE, _score(content, "reward"), messages=messages, ends=ends, saved=saved)
    return Outcome(DONE, _score(content, "score"))


def _score(content: dict[str, Any], name: str) -> float:
    score: float = _content(content, name, float)
    if not abs(score) <= LARGEST_SCORE:
        raise BadAnswer(f"the {name} {score}")
    return score


def _content(content: dict[str, Any], name: str, kind: type) -> Any:
    """Return the only value of an answer, which must be exactly of this type: True is no score."""
    if list(content) != [name] or type(content[name]) is not kind:
        raise BadAnswer(f"it does not hold {name} ({kind.__name__}) alone")
    return content[name]


def _messages(listed: list[Any], most_characters: int) -> tuple[Message, ...]:
    if len(listed) > MOST_MESSAGES:
        raise BadAnswer(f"{len(listed)} messages")
    for message in listed:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise BadAnswer("a message without role and content alone")
        for key, most in (("role", MOST_ROLE_CHARACTERS), ("content", most_characters)):
            text = message[key]
            # Halves of characters can be written in JSON, but no tokenizer takes them.
            if not isinstance(text, str) or len(text) > most or not _is_encodable(text):
                raise BadAnswer(f"a message whose {key} is no text of up to {most} characters")
    return tuple(listed)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
