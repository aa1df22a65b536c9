"""No secret comes through redaction, wherever it stands; and any bytes of a service are scores or one line."""

from __future__ import annotations

import json
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from raw_services import serving
from rlhf_megatron.errors import RewardError
from rlhf_megatron.http_client import ExchangeError, HttpClient
from rlhf_megatron.monitor.environment_report import redact_argument
from rlhf_megatron.redaction import HIDDEN, hide_secrets, redact
from rlhf_megatron.rewards.service import _outcomes

SECRET = "q7zk-p4ss-w0rd"
NAMES = st.sampled_from(["api_key", "apiKey", "pwd", "auth", "cookie", "tokens", "x-api-key", "clientSecret", "key"])
PLAIN = st.sampled_from(["style", "max_tokens", "a", "eos_token", "list"])
SECRETS = st.sampled_from([SECRET, [SECRET], {"a": SECRET}, {"b": [{"c": SECRET}]}, (SECRET, 1)])
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES | st.dictionaries(NAMES, SECRETS, min_size=1, max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=8,
)
ANSWERS = st.lists(
    st.sampled_from(
        ["{", "}", "[", "]", ",", ":", '"scores"', '"a"', "1", "-0.5", "1e999", "NaN", "true", "null", '"x\\n"', "é"]
    ),
    max_size=10,
).map("".join)
HTTP = st.lists(
    st.sampled_from(
        [b"HTTP/1.1 200 OK", b"HTTP/1.1 100 Continue", b"HTTP/1.1 503 ", b"\r\n", b"\r\n\r\n", b"\n", b"\0", b"\xff",
         b"Content-Length: 3", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"0\r\n\r\n", b"5\r\n", b":"]
    ),
    max_size=12,
).map(b"".join)  # fmt: skip


@given(VALUES)
def test_a_secret_at_any_depth_is_hidden_and_the_rest_is_kept(value: Any) -> None:
    hidden = redact({"top": value})
    assert SECRET not in json.dumps(hidden)
    assert redact(hidden) == hidden
    if SECRET not in repr(value):
        assert hidden == {"top": value}


@given(VALUES, st.sampled_from(["", "}", "]", "{", ": ", "\n"]))
def test_an_argument_shows_no_secret_even_where_its_yaml_is_broken(value: Any, more: str) -> None:
    text = json.dumps(value) if more else yaml.safe_dump(json.loads(json.dumps(value)), default_flow_style=True)
    argument = f"data.chat_template_kwargs={text}{more}"
    if SECRET in argument and not more:
        assert SECRET not in redact_argument(argument) and HIDDEN in redact_argument(argument)
    redact_argument(argument)


@given(st.lists(st.sampled_from([*"=:?&{}'\"@/- \n", "key", "://", "Bearer", "pwd", "a"])).map("".join) | st.text())
def test_a_secret_in_a_text_is_hidden_whatever_stands_before_it(text: str) -> None:
    for form in ("password={}", "api_key: {}", "http://u:{}@h/", "http://h/?token={}"):
        assert SECRET not in hide_secrets(f"{text} {form.format(SECRET)}")


@given(ANSWERS.map(str.encode) | st.binary(), st.integers(1, 3))
def test_any_answer_is_so_many_outcomes_or_one_line(answer: bytes, count: int) -> None:
    try:
        outcomes = _outcomes(answer, count)
    except RewardError as error:
        assert str(error).isprintable() and len(str(error)) < 500
    else:
        assert len(outcomes) == count
        assert all((outcome.message or "").isprintable() for outcome in outcomes)


def test_any_bytes_of_a_server_are_an_answer_or_one_line() -> None:
    sent = [b""]
    with serving(lambda connection, before: connection.sendall(sent[0])) as service:
        client = HttpClient(service.url)

        @given(HTTP | st.binary(max_size=200))
        def exchange(content: bytes) -> None:
            sent[0] = content
            try:
                answer = client.post(b"{}", 20.0, 100)
            except ExchangeError as error:
                assert str(error).isprintable() and "no answer within" not in str(error)
            else:
                assert len(answer.body) <= 100

        exchange()
