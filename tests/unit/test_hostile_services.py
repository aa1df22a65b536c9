"""Services that answer anything: each costs its deadline at most, and is one line or a right score."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raw_services import (
    ENDLESS,
    NO_ANSWER,
    RIGHT_ANSWER,
    SCORE,
    WRONG_ANSWER,
    Behaviour,
    answer,
    drips,
    sends,
    serving,
    then_waits,
)
from rlhf_megatron.http_client import ExchangeError, HttpClient
from rlhf_megatron.monitor.alerts import AlertSender
from rlhf_megatron.recipe import RewardSection
from rlhf_megatron.recipe.health import AlertSection
from rlhf_megatron.rewards.score import RewardError, ScoreItem, Scorer

# Far beyond any deadline below, and below what a server that is waited for would take.
HUNG_SECONDS = 20.0
VARIABLE, SECRET = "JUDGE_HEADER", "Bearer not-to-be-seen-1"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv(VARIABLE, SECRET)


def score(url: str, seconds: float = 0.3, rows: int = 1, retries: int = 0) -> list[float]:
    service = {"url": url, "max_retries": retries, "backoff_seconds": 0.01, "header_environment": VARIABLE}
    section = RewardSection.model_validate({"service": service, "timeout_seconds": seconds})
    with Scorer(section) as scorer:
        return scorer.score([ScoreItem("d", str(row), "t", {}, row) for row in range(rows)])


def refused(url: str, seconds: float = 0.3) -> str:
    """Return what is told of a service that gives no score."""
    begun = time.monotonic()
    with pytest.raises(RewardError, match=r"^sample of row 0 \(data_source d\): reward\.service ") as told:
        score(url, seconds)
    assert time.monotonic() - begun < HUNG_SECONDS
    line = str(told.value)
    assert line.isprintable() and len(line) < 600 and "not-to-be-seen" not in line
    return line


def wait_until_closed(connections: set[socket.socket]) -> None:
    end = time.monotonic() + HUNG_SECONDS
    while connections and time.monotonic() < end:
        time.sleep(0.01)
    assert not connections


@pytest.mark.parametrize("behave", ENDLESS.values(), ids=ENDLESS)
def test_a_service_without_end_costs_its_deadline_and_its_connection(behave: Behaviour) -> None:
    with serving(behave) as service:
        line = refused(service.url)
        assert "no answer within 0.3 s" in line or "no valid answer over HTTP" in line
        wait_until_closed(service.open)


@pytest.mark.parametrize("behave", NO_ANSWER.values(), ids=NO_ANSWER)
def test_what_is_no_answer_is_told_in_one_line(behave: Behaviour) -> None:
    with serving(behave) as service:
        refused(service.url)
        wait_until_closed(service.open)


@pytest.mark.parametrize("behave", WRONG_ANSWER.values(), ids=WRONG_ANSWER)
def test_an_answer_without_the_score_is_told_in_one_line(behave: Behaviour) -> None:
    with serving(behave) as service:
        refused(service.url, seconds=1.0)
        assert len(service.requests) == 1, "a redirect is not followed"


@pytest.mark.parametrize("behave", RIGHT_ANSWER.values(), ids=RIGHT_ANSWER)
def test_what_is_odd_and_right_is_taken(behave: Behaviour) -> None:
    with serving(behave) as service:
        assert score(service.url, seconds=HUNG_SECONDS) == [1.0]


def test_a_service_that_reads_no_request_costs_its_deadline() -> None:
    with serving(lambda connection, before: time.sleep(HUNG_SECONDS), reads_request=False) as service:
        client = HttpClient(service.url)
        with pytest.raises(ExchangeError, match="no answer within 0.3 s"):
            client.post(b" " * 30_000_000, 0.3, 100)


def test_a_tls_handshake_that_hangs_costs_its_deadline() -> None:
    with serving(then_waits(b""), reads_request=False) as service:
        assert "no answer within 0.3 s" in refused(service.url.replace("http", "https"))


def test_a_name_that_is_not_looked_up_costs_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hung.wait(HUNG_SECONDS))
    try:
        assert "no answer within 0.3 s" in refused("http://judge.invalid/")
    finally:
        hung.set()


@pytest.mark.parametrize("status", [b"503 Busy", b"401 No", b"500 Oh"])
def test_retries_end_at_their_number_and_each_has_its_own_connection(status: bytes) -> None:
    with serving(sends(answer(b"", b"HTTP/1.1 " + status + b"\r\nRetry-After: 0\r\n"))) as service:
        with pytest.raises(RewardError):
            score(service.url, retries=2)
        assert len(service.requests) == (1 if b"401" in status else 3)


@pytest.mark.parametrize("after", ["²", "-1", "1e9", "nan", "", "9" * 5000, "Wed, 21 Oct 2015 07:28:00 GMT", "0x1"])
def test_a_retry_after_that_is_no_number_counts_as_none(after: str) -> None:
    def behave(connection: socket.socket, before: int) -> None:
        head = b"HTTP/1.1 503 Busy\r\nRetry-After: " + after.encode() + b"\r\n"
        connection.sendall(answer(b"", head) if before == 0 else answer(SCORE))

    with serving(behave) as service:
        assert score(service.url, retries=1) == [1.0]


def test_a_surplus_answers_no_other_request() -> None:
    with serving(then_waits(answer(SCORE) + answer(b'{"scores": [9.0]}'))) as service:
        assert score(service.url, seconds=HUNG_SECONDS, rows=8) == [1.0] * 8


def test_a_cookie_is_not_sent_back() -> None:
    with serving(sends(answer(SCORE, b"HTTP/1.1 200 OK\r\nSet-Cookie: a=b\r\n"))) as service:
        score(service.url, rows=3)
        assert not any(b"cookie" in request.lower() for request in service.requests)
        assert all(b"not-to-be-seen" in request for request in service.requests)


ECHOES = {
    "body": answer(b"bad key: " + SECRET.encode(), b"HTTP/1.1 401 No\r\n"),
    "its token alone": answer(SECRET.split()[1].encode(), b"HTTP/1.1 401 No\r\n"),
    "reason": answer(b"", b"HTTP/1.1 401 " + SECRET.encode() + b"\r\n"),
    "at the cut": answer(b"a" * 190 + SECRET.encode(), b"HTTP/1.1 401 No\r\n"),
    "at the cut of an answer": answer(b"a" * 70 + SECRET.encode()),
    "answer": answer(b'{"echo": "%s"}' % SECRET.encode()),
    "score": answer(b'{"scores": ["%s"]}' % SECRET.encode()),
    "scores": answer(b'{"scores": "%s"}' % SECRET.encode()),
    "no HTTP": SECRET.encode() + b"\r\n\r\n",
    "header": b"HTTP/1.1 200 OK\r\n" + SECRET.encode() + b"\r\n\r\n",
}


@pytest.mark.parametrize("content", ECHOES.values(), ids=ECHOES)
def test_a_service_that_repeats_the_secret_does_not_bring_it_into_a_line(content: bytes) -> None:
    with serving(sends(content)) as service:
        refused(service.url)


def test_many_requests_to_a_service_that_drips_end_together() -> None:
    with serving(drips(b"HTTP/1.1 200 OK\r\n", b"X: a\r\n")) as service:
        begun = time.monotonic()
        with pytest.raises(RewardError, match="no answer within 0.5 s"):
            score(service.url, seconds=0.5, rows=64)
        assert time.monotonic() - begun < HUNG_SECONDS


@pytest.mark.parametrize("name", ["headers byte by byte", "100 Continue, flooded", "error headers byte by byte"])
def test_an_alert_waits_no_longer_than_its_deadline(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("rlhf_megatron.monitor.alerts.HTTP_SECONDS", 0.3)
    told: list[str] = []
    with serving(ENDLESS[name]) as service:
        monkeypatch.setenv("HOOK", service.url)
        sender = AlertSender(AlertSection(webhook_environment="HOOK", retries=1), told.append, first_pause=0.01)
        sender.send("fire", {"why": f"header {SECRET}"})
        sender.close(HUNG_SECONDS)
        assert told == ["warning: alert not delivered by webhook after 2 attempts: no answer within 0.3 s"]
        assert not any(b"not-to-be-seen" in request for request in service.requests)


@pytest.mark.parametrize(
    "proxy", ["socks5://u:hidden-9@127.0.0.1:1", "gopher://u:hidden-9@h", "http://u:hidden-9@[::1"]
)
def test_a_proxy_that_cannot_be_used_is_told_at_the_start(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    with pytest.raises(RewardError, match=r"^reward\.service\.url: the URL, or the proxy that .*; correct it$") as told:
        score("http://judge.invalid/")
    assert "hidden-9" not in str(told.value)


def test_the_proxy_of_the_environment_is_used_and_netrc_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("default login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(sends(answer(SCORE))) as proxy:
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.port}")
        assert score("http://judge.invalid/score") == [1.0]
        [request] = proxy.requests
        assert request.startswith(b"POST http://judge.invalid/score HTTP/1.1\r\n") and b"Basic" not in request


@pytest.fixture
def loop_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    errors: list[object] = []
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_exception_handler", lambda loop, context: errors.append(context))
    yield errors


def test_a_cancelled_exchange_leaves_nothing_behind(loop_errors: list[object]) -> None:
    with serving(ENDLESS["body byte by byte"]) as service:
        for _ in range(3):
            refused(service.url)
        wait_until_closed(service.open)
    assert loop_errors == []
