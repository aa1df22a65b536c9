"""Whatever a worker sends: only the nonce of an open job settles that job, with a finite score, and once."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlhf_megatron.rewards import worker
from rlhf_megatron.rewards.answers import BadAnswer, Batch, Outcome

ODD = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(10**400)
VALUES = st.recursive(ODD, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
STATES = st.sampled_from(["started", "done", "failed", "unusable", "timed_out", "died", ""]) | VALUES
KEYS = st.sampled_from(["score", "awaited", "message", "messages", "reward", "done", "state", "job", "x"])
KINDS = st.sampled_from(
    [
        {"kind": worker.USER_FUNCTION},
        {"kind": worker.USER_FUNCTION, "load_only": True},
        {"kind": worker.TURN, "most": 9},
        {"kind": worker.ENVIRONMENT, "most": 9},
    ]
)
# Place of the job whose nonce is given, or what stands there instead; state; and the rest.
LINES = st.lists(st.tuples(st.integers(0, 2) | VALUES, STATES, st.dictionaries(KEYS, VALUES, max_size=3)), max_size=8)


def is_sound(outcome: Outcome, job: dict[str, Any]) -> bool:
    texts = [text for message in outcome.messages for text in message.values()]
    return (
        type(outcome.score) is float
        and math.isfinite(outcome.score)
        and outcome.message.isprintable()
        and (outcome.state != worker.DONE or job["kind"] in (worker.TURN, worker.ENVIRONMENT) or not texts)
        and all(isinstance(text, str) and text.encode() is not None for text in texts)
    )


@given(KINDS, LINES)
def test_only_the_right_nonce_settles_a_job(kind: dict[str, Any], lines: list[Any]) -> None:
    batch = Batch([kind, kind, kind])
    for place, state, rest in lines:
        nonce = batch.jobs[place]["nonce"] if type(place) is int and 0 <= place < 3 else place
        before = dict(batch.outcomes)
        try:
            batch.take(json.dumps({**rest, "nonce": nonce, "state": state}).encode())
        except BadAnswer as error:
            assert str(error).isprintable() and len(str(error)) < 500
            assert batch.outcomes == before
            break
        new = batch.outcomes.keys() - before.keys()
        assert batch.outcomes | before == batch.outcomes, "what is settled stays"
        assert new <= {place} if state != "started" else not new
        assert all(is_sound(batch.outcomes[settled], kind) for settled in new)


@given(KINDS, st.binary() | st.text().map(str.encode))
def test_any_bytes_are_no_answer(kind: dict[str, Any], line: bytes) -> None:
    batch = Batch([kind])
    try:
        batch.take(line)
    except BadAnswer as error:
        assert str(error).isprintable()
    else:
        raise AssertionError(f"{line!r} holds no nonce that could be known")
    assert not batch.outcomes


@given(st.lists(st.text(max_size=9), max_size=3), st.floats(width=32), st.booleans())
def test_replies_of_an_environment_arrive_as_they_are(texts: list[str], reward: float, done: bool) -> None:
    batch = Batch([{"kind": worker.ENVIRONMENT, "most": 9}])
    nonce, messages = batch.jobs[0]["nonce"], [{"role": "user", "content": text} for text in texts]
    batch.take(json.dumps({"nonce": nonce, "state": "started", "awaited": False}).encode())
    answer = {"nonce": nonce, "state": "done", "messages": messages, "reward": reward, "done": done}
    try:
        batch.take(json.dumps(answer).encode())
    except BadAnswer:
        assert not math.isfinite(reward) or any("\ud800" <= letter <= "\udfff" for text in texts for letter in text)
    else:
        assert batch.outcomes == {0: Outcome(worker.DONE, reward, messages=tuple(messages), ends=done)}


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_every_finite_score_arrives_as_it_is(score: float) -> None:
    batch = Batch([{"kind": worker.USER_FUNCTION}])
    nonce = batch.jobs[0]["nonce"]
    batch.take(json.dumps({"nonce": nonce, "state": "started", "awaited": False}).encode())
    batch.take(json.dumps({"nonce": nonce, "state": "done", "score": score}).encode())
    assert batch.is_done and batch.outcomes == {0: Outcome(worker.DONE, score)}
