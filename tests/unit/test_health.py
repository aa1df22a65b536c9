"""Rules over metrics, the watch on memory, alerts (to a real HTTP server and real commands), bad gradients."""

from __future__ import annotations

import http.server
import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.alerts import HOUR, AlertSender
from rlhf_megatron.monitor.rule_watch import Finding, RuleWatch, WatchState, observe, slope
from rlhf_megatron.recipe import RecipeError, load_recipe
from rlhf_megatron.recipe.health import DEFAULT_RULES, AlertSection, HealthRuleSection, HealthSection
from rlhf_megatron.runtime.finite import BadTensor, nonfinite_gradients
from rlhf_megatron.runtime.health_rules import Health, HealthStop, memory_metrics

ROOT = Path(__file__).resolve().parents[2]
NAN, INF = math.nan, math.inf


def rule(when: str, value: float | None = None, **more: Any) -> HealthRuleSection:
    return HealthRuleSection(metric=more.pop("metric", "m"), when=when, value=value, **more)


def speaks_at(watched: HealthRuleSection, values: list[float]) -> list[int]:
    """Return the places in ``values`` at which the rule speaks."""
    watch = RuleWatch([watched])
    return [step for step, value in enumerate(values) if watch.findings(step, {"m": value})]


# Rules


@pytest.mark.parametrize(
    ("watched", "values", "places"),
    [
        (rule("above", 1.0), [0, 1, 2, 3, 1, 2], [2, 5]),  # once, and again after it has not held
        (rule("above", 1.0, steps=3), [2, 2, 0, 2, 2, 2, 2, 2], [5]),
        (rule("below", 0.0, steps=2), [-1, -1, 0, -1, -1], [1, 4]),
        (rule("above", 1.0, steps=2), [2, NAN, 2, NAN], [2]),  # what is not finite is another rule's matter
        (rule("not_finite"), [1, NAN, NAN, 1, INF, -INF, 0], [1, 4]),
        (rule("not_finite", steps=2), [NAN, 1, NAN, INF], [3]),
        (rule("moving_std_above", 0.9, window=4), [0, 0, 2, 2, 2, 2], [3]),  # stds 1, 0.87, 0 once there are four
        (rule("moving_std_above", 0.9, window=4, steps=2), [0, 2, 0, 2, 0, 0, 0], [4]),
        (rule("slope_above", 0.9, window=4), [5, 5, 5, 6, 7, 8, 9], [5]),
        (rule("slope_above", 0.3, window=8), [1] * 8 + [9] * 8, []),  # a jump is no growth
    ],
)
def test_a_rule_speaks_when_its_condition_has_held(
    watched: HealthRuleSection, values: list[float], places: list[int]
) -> None:
    assert speaks_at(watched, values) == places


def test_statistics_are_those_of_numpy() -> None:
    values = numpy.random.default_rng(0).normal(size=50).cumsum().tolist()
    assert slope(values) == pytest.approx(numpy.polyfit(range(50), values, 1)[0])
    deviation = float(numpy.std(values[-20:]))
    for limit, expected in ((deviation * 1.001, False), (deviation * 0.999, True)):
        state, spoke = WatchState(), False
        for value in values:
            state, _ = observe(rule("moving_std_above", limit), state, value)
        spoke = state.streak > 0
        assert spoke is expected
    assert len(state.values) == 20


def test_the_memory_watch_sees_a_leak_in_noise_and_no_growth_in_noise_alone() -> None:
    host = next(rule for rule in DEFAULT_RULES if rule.metric == "memory/host_gb")
    noise = numpy.random.default_rng(0).normal(scale=0.2, size=400)
    steady = RuleWatch([host])
    assert not [step for step in range(400) if steady.findings(step, {host.metric: 10.0 + noise[step]})]
    leaking = RuleWatch([host])
    found = [step for step in range(400) if leaking.findings(step, {host.metric: 10.0 + 0.05 * step + noise[step]})]
    assert len(found) >= 1


def test_memory_metrics_see_what_this_process_takes() -> None:
    before = memory_metrics()["memory/host_gb"]
    block = numpy.ones(2**25)  # a quarter of a GB, written to
    assert memory_metrics()["memory/host_gb"] - before == pytest.approx(block.nbytes / 2**30, abs=0.05)


def test_patterns_follow_each_metric_by_itself() -> None:
    watch = RuleWatch([rule("below", 0.5, metric="eval/*/accuracy", steps=2)], rank=3)
    assert watch.unseen() == ["eval/*/accuracy"]
    assert watch.findings(1, {"eval/a/accuracy": 0.1, "eval/b/accuracy": 0.9, "reward/mean": 0.0}) == []
    [finding] = watch.findings(2, {"eval/a/accuracy": 0.2, "eval/b/accuracy": 0.1})
    assert finding.text() == "step 2: eval/a/accuracy = 0.2: below 0.5, for 2 steps"
    assert watch.unseen() == []
    memory = Finding(rule("above", 7, metric="memory/gpu_gb"), 3, 9, "memory/gpu_gb", 7.5)
    assert memory.text() == "step 9: memory/gpu_gb = 7.5 on rank 3: above 7"


def test_default_rules_only_log_and_stand_in_the_documentation() -> None:
    assert {rule.action for rule in DEFAULT_RULES} == {"log"}
    lines = (ROOT / "docs" / "health.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    documented = {tuple(row[:4]) for row in rows}
    assert documented == {
        (r.metric, r.when, "" if r.value is None else f"{r.value:g}", str(r.steps)) for r in DEFAULT_RULES
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{metric: train/kl, when: above}", "health.rules.0: train/kl: give value with above, below"),
        ("{metric: train/kl, when: not_finite, value: 1}", "train/kl: give value with above, below"),
        ("{metric: train/kl, when: slope_above, value: 1, window: 3}", "window=3 must be at least 4"),
        ("{metric: train/kl, when: above, value: 1, action: panic}", "health.rules.0.action"),
        ("{metrik: train/kl, when: above, value: 1}", "unknown key health.rules.metrik; did you mean"),
    ],
)
def test_rules_that_make_no_sense_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint):
        load_recipe(ROOT / "recipes" / "tiny_grpo.yaml", [f"health.rules=[{text}]"])


# Alerts


class Service(http.server.ThreadingHTTPServer):
    """A webhook that answers with the given statuses, then with 200, and keeps what it was sent."""

    def __init__(self, statuses: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.statuses, self.received, self.methods = list(statuses), [], []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/hook/secret-token"


class Answering(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers["Content-Type"] == "application/json"
        self.server.received.append(json.loads(body))
        self.server.methods.append(self.command)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.server.url)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    server = Service([])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("TEST_WEBHOOK", server.url)
    yield server
    server.shutdown()
    server.server_close()


def section(**settings: Any) -> AlertSection:
    return AlertSection(**{"webhook_environment": "TEST_WEBHOOK", **settings})


def send(settings: AlertSection, *texts: str) -> list[str]:
    """Send alerts to the end; what the sender had to tell."""
    told: list[str] = []
    sender = AlertSender(settings, told.append, first_pause=0.01)
    for text in texts:
        assert sender.send(text, {"step": 4})
    sender.close()
    return told


def test_a_webhook_is_tried_again_until_it_answers(service: Service) -> None:
    service.statuses = [503, 429]
    assert send(section(), "one", "two") == []
    one, two = ({"text": text, "withheld": 0, "step": 4} for text in ("one", "two"))
    assert service.received == [one, one, one, two]


@pytest.mark.parametrize(
    ("statuses", "attempts", "told"),
    [([404], 1, "after 1 attempts: HTTP status 404"), ([500] * 9, 3, "after 3 attempts: HTTP status 500"),
     ([302], 1, "after 1 attempts: HTTP status 302")],
)  # fmt: skip
def test_an_alert_that_cannot_be_delivered_is_told_without_its_address(
    service: Service, statuses: list[int], attempts: int, told: str
) -> None:
    service.statuses = statuses
    [line] = send(section(retries=2), "fire")
    assert told in line and "secret-token" not in line and service.url not in line
    assert service.methods == ["POST"] * attempts


def test_a_server_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_WEBHOOK", "http://127.0.0.1:9/secret-token")  # the discard port: nobody listens
    [line] = send(section(retries=1), "fire")
    assert line == "warning: alert not delivered by webhook after 2 attempts: Connection refused"


def test_alerts_beyond_the_hours_number_are_counted(service: Service) -> None:
    now = [0.0]
    sender = AlertSender(section(most_per_hour=2), print, clock=lambda: now[0])
    assert [sender.send(text, {}) for text in ("a", "b", "c", "d")] == [True, True, False, False]
    assert sender.send("stop", {}, urgent=True)
    now[0] = HOUR
    assert sender.send("e", {})
    sender.close()
    assert [(alert["text"], alert["withheld"]) for alert in service.received] == [
        ("a", 0), ("b", 0), ("stop", 2), ("e", 0)
    ]  # fmt: skip


def test_a_command_gets_the_alert_and_no_shell_sees_it(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "record = {'arguments': sys.argv[1:], 'input': json.load(sys.stdin)}\n"
        "pathlib.Path(__file__).with_name('told.json').write_text(json.dumps(record))\n"
    )
    text = f"$(touch {tmp_path}/made); `touch {tmp_path}/made` > x"
    settings = AlertSection(command=[sys.executable, str(script), "--text={message}", "$HOME"])
    assert send(settings, text) == []
    told = json.loads((tmp_path / "told.json").read_text())
    assert told == {"arguments": [f"--text={text}", "$HOME"], "input": {"text": text, "withheld": 0, "step": 4}}
    assert not (tmp_path / "made").exists()


def test_a_command_that_fails_is_tried_again_and_told(tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = f"import sys; open({str(count)!r}, 'a').write('x'); sys.exit('no route')"
    [line] = send(AlertSection(command=[sys.executable, "-c", code], retries=2), "fire")
    assert count.read_text() == "xxx"
    assert "by command after 3 attempts" in line and line.endswith("ended with status 1: no route")
    [line] = send(AlertSection(command=["/nowhere/notify"]), "fire")
    assert line.endswith("after 1 attempts: /nowhere/notify: No such file or directory")


def test_a_command_may_print_any_bytes(tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = (
        f"import sys; open({str(count)!r}, 'a').write('x')\n"
        "for stream in (sys.stdout, sys.stderr): stream.buffer.write(b'caf\\xe9')\n"
        "sys.exit(int(sys.argv[1] == 'two'))"
    )
    settings = AlertSection(command=[sys.executable, "-c", code, "{message}"], retries=0)
    [line] = send(settings, "one", "two", "three")
    assert count.read_text() == "xxx" and line.endswith("ended with status 1: caf\ufffd")


def test_an_alert_that_no_command_can_be_given_costs_none_of_the_later_ones(tmp_path: Path) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    settings = AlertSection(command=[sys.executable, "-c", code, str(tmp_path / "told"), "{message}"])
    [line] = send(settings, "a null byte: \0", "later")
    assert line == "warning: alert not delivered by command: ValueError"
    assert (tmp_path / "told").read_text() == "later"


def test_an_address_that_is_not_ascii_is_told_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_WEBHOOK", "http://127.0.0.1:9/secret-\u00fctoken")
    lines = send(section(retries=0), "one", "two")
    assert lines == ["warning: alert not delivered by webhook after 1 attempts: Connection refused"] * 2


ADDRESSES_THAT_ARE_NONE = (
    None,
    "",
    "file:///etc/secret-token",
    "secret-token",
    "http://",
    "http:///secret-token",
    "http://[::1/secret-token",
    "http://127.0.0.1:99999/secret-token",
    "http://127.0.0.1:secret-token@x:y/",
    "https://a/secret-token\n\tb",
)


@pytest.mark.parametrize("value", ADDRESSES_THAT_ARE_NONE)
def test_an_address_that_is_none_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("TEST_WEBHOOK", raising=False)
    else:
        monkeypatch.setenv("TEST_WEBHOOK", value)
    with pytest.raises(MonitorError, match="environment variable TEST_WEBHOOK") as caught:
        AlertSender(section(), print)
    assert "secret-token" not in str(caught.value)


# All together


def test_a_run_is_logged_alerted_and_stopped_by_its_rules(service: Service) -> None:
    told: list[str] = []
    health = Health(
        HealthSection(
            default_rules=False,
            rules=[
                rule("above", 5, metric="train/kl"),
                rule("not_finite", metric="train/*", action="alert"),
                rule("below", 0.1, metric="train/entropy", steps=2, action="stop"),
            ],
            alert=section(),
        ),
        "a_run",
        told.append,
    )
    health.after(1, {"train/kl": 6.0, "train/entropy": 0.05})
    health.after(2, {"train/kl": NAN, "train/entropy": 0.5})
    health.after(3, {"train/kl": 1.0, "train/entropy": 0.05})
    with pytest.raises(
        HealthStop, match=r"^health.rules stopped the run: step 4: train/entropy = 0.05: below 0.1, for 2"
    ):
        health.after(4, {"train/kl": 1.0, "train/entropy": 0.05})
    assert told == [
        "health: step 1: train/kl = 6: above 5",
        "health: step 2: train/kl = nan: not finite",
        "health: step 4: train/entropy = 0.05: below 0.1, for 2 steps",
    ]
    alert, stop = service.received  # both are there by the time the run ends
    assert (alert["text"], alert["value"], alert["run"]) == (
        "a_run: step 2: train/kl = nan: not finite",
        "nan",
        "a_run",
    )
    assert stop["text"].endswith("for 2 steps; the run stops") and stop["rule"]["action"] == "stop"


def test_a_rule_whose_metric_never_comes_is_told() -> None:
    told: list[str] = []
    health = Health(HealthSection(rules=[rule("above", 5, metric="train/kll")]), "a_run", told.append)
    for step in range(1, 41):
        health.after(step, {"train/kl": 1.0})
    assert told == ["warning: health.rules: no metric train/kll in 20 steps; see docs/monitoring.md"]


def test_rules_of_evaluations_wait_for_the_first_evaluation() -> None:
    told: list[str] = []
    rules = [rule("below", 0.1, metric=name) for name in ("eval/*/accuracy", "eval/gsm8/accuracy")]
    health = Health(HealthSection(rules=rules), "a_run", told.append)
    for step in range(1, 61):
        health.after(step, {"train/kl": 1.0})
        if step % 30 == 0:
            health.after(step, {"eval/gsm8k/accuracy": 0.5})
    assert told == [
        "warning: health.rules: no metric eval/gsm8/accuracy in the first evaluation; see docs/monitoring.md"
    ]


# Gradients


def test_gradients_that_are_not_finite_are_counted_where_megatron_keeps_them() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    module[0].weight.grad = torch.tensor([[1.0, NAN, INF], [-INF, 0.0, 0.0]])
    module[0].bias.grad = torch.ones(2)
    module[1].weight.grad = torch.full((1, 2), NAN)  # not looked at where there is a main_grad
    module[1].weight.main_grad = torch.zeros(1, 2)
    module[1].bias.main_grad = torch.tensor([NAN], dtype=torch.bfloat16)
    found = nonfinite_gradients(module.named_parameters())
    assert found == [BadTensor("0.weight", nan=1, infinite=2, elements=6), BadTensor("1.bias", 1, 0, 1)]
    assert nonfinite_gradients(torch.nn.Linear(2, 2).named_parameters()) == []
