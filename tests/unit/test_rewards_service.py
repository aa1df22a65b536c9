"""A reward service over HTTP: a real server that fails at times, is slow at times, and looks at the header."""

from __future__ import annotations

import http.server
import json
import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlhf_megatron.errors import is_transient
from rlhf_megatron.recipe import RewardSection
from rlhf_megatron.rewards.score import RewardError, ScoreItem, Scorer

SECRET = "Bearer not-to-be-seen"
VARIABLE = "REWARD_SERVICE_AUTHORIZATION"

# (what was posted, times that it has been posted before) -> (status, body, seconds to wait first; below 0: to take for
# each byte)
Behaviour = Callable[[list[dict[str, Any]], int], tuple[int, Any, float]]


class Service(http.server.ThreadingHTTPServer):
    """Scores are the numbers in the responses; ``behave`` may answer otherwise."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/score"
        self.behave: Behaviour = lambda samples, before: (200, scores(samples), 0.0)
        self.bodies: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.most = 0
        self.lock = threading.Lock()


def scores(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"scores": [float(sample["solution_str"]) for sample in samples]}


class Handler(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with self.server.lock:
            before = self.server.bodies.count(body)
            self.server.bodies.append(body)
            self.server.headers.append(dict(self.headers))
            self.server.running += 1
            self.server.most = max(self.server.most, self.server.running)
        status, answer, seconds = self.server.behave(json.loads(body)["samples"], before)
        time.sleep(max(0.0, seconds))
        payload = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        with self.server.lock:
            self.server.running -= 1
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            for part in [payload] if seconds >= 0 else [payload[place : place + 1] for place in range(len(payload))]:
                self.wfile.write(part)
                time.sleep(max(0.0, -seconds))
        except OSError:
            pass  # a client that has given up

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def scorer(service: Service | str, on_failure: str = "stop", timeout: float = 5.0, **settings: Any) -> Scorer:
    url = service if isinstance(service, str) else service.url
    return Scorer(
        RewardSection.model_validate(
            {
                "service": {"url": url, "backoff_seconds": 0.01, **settings},
                "on_failure": on_failure,
                "timeout_seconds": timeout,
                "concurrency": 4,
            }
        )
    )


def items(count: int) -> list[ScoreItem]:
    return [
        ScoreItem(
            "some/data",
            str(row),
            f"truth {row}",
            {"index": row, "bytes": b"x", "level": math.nan, "range": [0.5, math.inf]},
            row,
        )
        for row in range(count)
    ]


def test_samples_are_posted_in_batches_and_many_requests_at_a_time(service: Service) -> None:
    service.behave = lambda samples, before: (200, scores(samples), 0.1)
    with scorer(service, samples_per_request=3) as scoring:
        assert scoring.score(items(31)) == [float(row) for row in range(31)]
        assert scoring.score([]) == []
    posted = sorted(
        (json.loads(body)["samples"] for body in service.bodies), key=lambda part: int(part[0]["solution_str"])
    )
    assert [len(samples) for samples in posted] == [3] * 10 + [1]
    assert posted[10] == [
        {
            "data_source": "some/data",
            "solution_str": "30",
            "ground_truth": "truth 30",
            "extra_info": {"index": 30, "bytes": "b'x'", "level": None, "range": [0.5, None]},
        }
    ]
    assert service.most == 4, "as many as reward.concurrency"
    assert {headers["Content-Type"] for headers in service.headers} == {"application/json"}


def test_a_service_that_fails_and_is_slow_at_times_is_asked_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)

    def moody(samples: list[dict[str, Any]], before: int) -> tuple[int, Any, float]:
        row = int(samples[0]["solution_str"])
        if before == 0 and row % 2:
            return [(503, "", 0.0), (429, "later", 0.0), (200, scores(samples), 2.0)][row % 3]
        if before == 1 and row % 4 == 1:
            return 500, "again", 0.0
        return 200, scores(samples), 0.0

    service.behave = moody
    with scorer(service, timeout=0.5, header="X-Key", header_environment=VARIABLE) as scoring:
        pending = scoring.submit(items(24))
        assert not pending.done()
        results = pending.result()
    assert [score.value for score in results] == [float(row) for row in range(24)]
    assert not any(score.failed or score.timed_out for score in results)
    assert len(service.bodies) == 24 + 12 + 6
    assert {headers["X-Key"] for headers in service.headers} == {SECRET}


@pytest.mark.parametrize(
    ("answer", "requests", "problem"),
    [
        ((503, "overloaded", 0.0), 3, "status 503 Service Unavailable: overloaded, at the last of 3 tries"),
        ((200, {"scores": [1.0]}, 5.0), 3, "no answer within 0.3 s, at the last of 3 tries"),
        ((200, {"scores": [1.0]}, -0.05), 3, "no answer within 0.3 s, at the last of 3 tries"),
        ((401, f"bad key {SECRET}", 0.0), 1, "status 401 Unauthorized: bad key ***"),
        ((404, "", 0.0), 1, "status 404 Not Found"),
        ((302, "", 0.0), 1, "status 302 Found"),
        ((200, "<html>", 0.0), 1, "the service answers '<html>' instead of"),
        ((200, {"score": 1.0}, 0.0), 1, 'instead of {"scores": [number, ...]}'),
        ((200, {"scores": [1.0, 2.0]}, 0.0), 1, "the service answers [1.0, 2.0] instead of a list of 1 scores"),
        ((200, {"scores": [None]}, 0.0), 1, "the service gives the sample None instead of a finite number"),
        ((200, {"scores": [10**400]}, 0.0), 1, "the service gives the sample 1000"),
        ((200, '{"scores": [NaN]}', 0.0), 1, "the service gives the sample nan instead of a finite number"),
    ],
)
def test_a_request_that_fails_for_good_is_told_in_one_line(
    service: Service,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    answer: tuple[int, Any, float],
    requests: int,
    problem: str,
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    service.behave = lambda samples, before: answer
    with (
        scorer(service, timeout=0.3, max_retries=2, header_environment=VARIABLE) as scoring,
        pytest.raises(
            RewardError, match=r"^sample of row 0 \(data_source some/data\): reward\.service http://127"
        ) as told,
    ):
        scoring.score(items(1))
    assert problem in str(told.value)
    assert "\n" not in str(told.value)
    # Only a service that was away, or asked to come again, may answer another attempt; ranks pass errors on by pickle.
    assert is_transient(pickle.loads(pickle.dumps(told.value))) == (requests > 1)
    assert len(service.bodies) == requests
    shown = capfd.readouterr()
    assert SECRET not in f"{told.value}{shown.out}{shown.err}{told.getrepr(style='short')}"


def test_what_fails_for_good_is_masked_or_worth_nothing_if_the_recipe_says_so(service: Service) -> None:
    def without_threes(samples: list[dict[str, Any]], before: int) -> tuple[int, Any, float]:
        return (500, "", 0.0) if samples[0]["solution_str"] == "3" else (200, scores(samples), 0.0)

    service.behave = without_threes
    with scorer(service, "zero", max_retries=1) as scoring:
        assert scoring.score(items(5)) == [0.0, 1.0, 2.0, 0.0, 4.0]
    with scorer(service, "mask", max_retries=1) as scoring:
        masked = scoring.score(items(5))
        assert math.isnan(masked[3]) and [*masked[:3], masked[4]] == [0.0, 1.0, 2.0, 4.0]
        assert (scoring.timeouts, scoring.failures) == (0, 1)


def test_a_service_that_never_answers_stops_the_run_whatever_the_recipe_says() -> None:
    with scorer("http://127.0.0.1:9/score", "mask", max_retries=1) as scoring:
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"sample of row 7 .* no connection: .*refused, at the last of 2 tries"):
            scoring.score(items(20))
        assert time.monotonic() - started < 10.0


def test_the_secret_comes_from_the_environment_alone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "", "two\nlines", "ü"):
        monkeypatch.delenv(VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(VARIABLE, value)
        with pytest.raises(RewardError, match=f"{VARIABLE} (is not set|holds more than one line)") as told:
            scorer(service, header_environment=VARIABLE)
        assert not value or value not in str(told.value)


def test_closing_ends_the_wait_for_retries(service: Service) -> None:
    service.behave = lambda samples, before: (503, "", 0.0)
    with scorer(service, backoff_seconds=1000.0) as scoring:
        pending = scoring.submit(items(4))
        while len(service.bodies) < 4:
            time.sleep(0.01)
    started = time.monotonic()
    with pytest.raises(RewardError, match="status 503"):
        pending.result()
    assert time.monotonic() - started < 10.0
