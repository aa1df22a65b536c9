"""The page of a run over loopback: who gets in, what is served, and kept rows as they are filtered."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import watch

from rlhf_megatron.errors import MonitorError
from rlhf_megatron.monitor.access import METRICS_VARIABLE, TOKEN_VARIABLE
from rlhf_megatron.monitor.kept_files import key_of, read_rows
from rlhf_megatron.monitor.kept_rows import TURNS
from rlhf_megatron.monitor.page_process import PageProcess
from rlhf_megatron.monitor.page_server import PageServer, page_token
from rlhf_megatron.monitor.rollout_view import Filters, filters_of, rollouts_view
from rlhf_megatron.recipe import RecipeError, load_recipe
from rlhf_megatron.recipe.operations import PageSection
from run_pages import Page, kept, write_rows, write_run, write_samples

TOKEN = "a-token-of-the-test"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "one", reward={"rule": "gsm8k"})
    for step in (2, 4):
        write_rows(folder, step, [kept(step, group, reward) for group in range(3) for reward in (0.0, 1.0)])
    write_samples(folder, 4, "an answer")
    return folder


@pytest.fixture
def server(run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with watch.server_of([str(run)], "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def get(port: int, path: str, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def opened(server: PageServer, path: str, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    return get(server.server_port, path, Authorization=f"Bearer {TOKEN}", **headers)


def test_the_token_becomes_a_cookie_and_leaves_the_address(server: PageServer) -> None:
    status, _, headers = get(server.server_port, f"/?token={TOKEN}")
    assert (status, headers["Location"]) == (303, "/")
    cookie, *guards = headers["Set-Cookie"].split("; ")
    assert set(guards) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert get(server.server_port, "/", Cookie=f"other=1; {cookie}")[0] == 200
    assert get(server.server_port, f"//elsewhere.example?token={TOKEN}")[2]["Location"] == "/"


@pytest.mark.parametrize("path", ["/", "/part", "/rollouts", "/?token=", f"/?token={TOKEN}x", "/none", "/recipe.yaml"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer x"}, {"Cookie": "rlhf_megatron=x"}])
def test_nothing_is_told_without_the_token(server: PageServer, path: str, headers: dict[str, str]) -> None:
    status, text, _ = get(server.server_port, path, **headers)
    assert (status, text) == (403, "open the address with its token, as the command printed it\n")


def test_a_token_for_numbers_opens_no_prompts_and_no_responses(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setenv(METRICS_VARIABLE, "numbers-of-the-test")
    with watch.server_of([str(run)], "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        cookie = get(server.server_port, "/?token=numbers-of-the-test")[2]["Set-Cookie"].partition(";")[0]
        for path in ("/", "/part"):
            whole, (status, numbers, _) = opened(server, path)[1], get(server.server_port, path, Cookie=cookie)
            assert "question 1?" in whole and "an answer" in whole
            assert status == 200 and "question 1?" not in numbers and "an answer" not in numbers
            assert "reward/mean" in numbers or "Reward" in numbers
        status, text, _ = get(server.server_port, "/rollouts", Authorization="Bearer numbers-of-the-test")
        assert status == 403 and text.startswith("this token opens numbers alone")
        assert get(server.server_port, "/", Authorization="Bearer another-token-here")[0] == 403
        server.shutdown()
    monkeypatch.setenv(METRICS_VARIABLE, TOKEN)
    with pytest.raises(MonitorError, match=f"{METRICS_VARIABLE} has the token of {TOKEN_VARIABLE}"):
        page_token()


@pytest.mark.parametrize("path", ["/recipe.yaml", "/../one/recipe.yaml", "/rollouts/step-2.parquet", "/part/"])
def test_files_are_not_served(server: PageServer, path: str) -> None:
    assert opened(server, path)[0] == 404


def test_a_page_of_its_own_has_a_policy_and_no_links_elsewhere(server: PageServer) -> None:
    for path in ("/", "/rollouts", "/rollouts?kind=evaluation"):
        status, text, headers = opened(server, path)
        page = Page(text)
        assert status == 200 and page.scripts == 1
        assert not any("//" in link or ":" in link for link in page.links)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'sha256-")
        assert (headers["Cache-Control"], headers["Referrer-Policy"]) == ("no-store", "no-referrer")


def test_unchanged_numbers_are_not_sent_again(server: PageServer, run: Path) -> None:
    status, text, headers = opened(server, "/part")
    assert status == 200 and "<html" not in text
    assert opened(server, "/part", If_None_Match=headers["ETag"])[:2] == (304, "")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "reward/mean": 0.875}\n')
    status, text, _ = opened(server, "/part", If_None_Match=headers["ETag"])
    assert status == 200 and "0.875" in text


def test_a_run_without_numbers_waits_for_them(server: PageServer, run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    status, text, _ = opened(server, "/")
    assert status == 200 and "No numbers yet" in text
    assert opened(server, "/part")[0] == 503 and opened(server, "/rollouts")[0] == 200


def test_responses_are_text_with_the_mismatch_of_each_token(server: PageServer) -> None:
    text = opened(server, "/rollouts?step=4&only=wrong&source=words&longest=3")[1]
    page = Page(text)
    assert [word for word in page.of("span") if "wrong" in word] == ["\u2717 wrong"]
    assert '<span class="near" data-t=' in text and "&lt;b&gt;</span>" in text
    assert '<span class="m2" data-t="rollout logprob -1\ntrainer logprob -1.2\ndifference -0.2' in text
    assert '<span class="p3"' in text and "<b> four" not in text


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("lowest=x", "lowest=x: is no number"),
        ("step=nan", "step=nan: is no number"),
        ("longest=1e999", "longest=1e999: is no number"),
        ("kind=other", "kind=other: is training or evaluation"),
        ("prompt=../x", "prompt=../x: names no prompt"),
        ("only=<b>", "only=<b>: is wrong or right"),
    ],
)
def test_a_filter_that_is_none_is_told(server: PageServer, query: str, problem: str) -> None:
    status, text, headers = opened(server, f"/rollouts?{query}")
    assert (status, text, headers["Content-Type"]) == (400, problem + "\n", "text/plain; charset=utf-8")


FOUND = [
    ({}, 6),
    ({"step": "2"}, 6),
    ({"step": "3"}, 0),
    ({"only": "right"}, 3),
    ({"source": "sums"}, 2),
    ({"lowest": "0.5"}, 3),
    ({"highest": "0.5", "shortest": "4"}, 2),
    ({"prompt": key_of("question 1?")}, 4),
]


@pytest.mark.parametrize(("query", "rows"), FOUND, ids=[json.dumps(query) for query, _ in FOUND])
def test_filters_let_rows_through(run: Path, query: dict[str, str], rows: int) -> None:
    [of_run] = rollouts_view({"one": (run, 1.0)}, filters_of(query)).runs
    assert (
        of_run.chosen == rows == sum(len(group.rows) for group in of_run.groups) == sum(b.chosen for b in of_run.bars)
    )


def test_runs_lie_beside_each_other_at_the_step_that_both_have(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "two")
    write_rows(other, 2, [kept(2, 1, 1.0)])
    view = rollouts_view({"one": (run, 1.0), "two": (other, None)}, Filters())
    assert view.filters.step == 2 and view.steps == [2, 4]
    first, second = view.runs
    assert [group.prompt for group in second.groups] == ["question 1?"]
    assert [group.right for group in first.groups] == [1, 1, 1] and second.groups[0].right is None
    over_steps = rollouts_view({"one": (run, 1.0)}, Filters(prompt=key_of("question 1?")))
    assert [group.step for group in over_steps.runs[0].groups] == [2, 4]
    assert [group.prompt for group in rollouts_view({"one": (run, 1.0)}, Filters("evaluation")).runs[0].groups] == [
        "2 + 2?"
    ]


def test_rewards_between_many_values_are_counted_once(run: Path) -> None:
    rewards = [index / 37 for index in range(38)]
    write_rows(run, 6, [kept(6, index, reward) for index, reward in enumerate(rewards)])
    [of_run] = rollouts_view({"one": (run, 1.0)}, Filters()).runs
    assert len(of_run.bars) == 12 and sum(bar.rows for bar in of_run.bars) == 38


def test_columns_of_other_types_and_lengths_are_passed_over(run: Path) -> None:
    path = write_rows(run, 6, [kept(6, 0, float("nan"), prompt=7, truncated="yes", sampled=[True])])
    [row] = read_rows(run, "training", 6, 1.0)
    assert (row.prompt, row.truncated, row.tokens, row.reward, row.wrong) == ("", False, [], None, None)
    path.write_bytes(b"PAR1")
    with pytest.raises(MonitorError, match=r"step-6\.parquet: is no parquet"):
        read_rows(run, "training", 6, 1.0)
    [of_run] = rollouts_view({"one": (run, 1.0)}, Filters()).runs
    assert of_run.rows == 0 and "is no parquet" in of_run.problems[0]


def test_a_small_file_that_decodes_to_much_is_not_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_megatron.monitor.kept_files.MOST_BYTES", 2**21)
    write_rows(run, 6, [kept(6, 0, 1.0, response="x" * 2**16) for _ in range(100)])
    with pytest.raises(MonitorError, match="decodes to more than 2,097,152 bytes"):
        read_rows(run, "training", 6, 1.0)


def test_turns_are_told_apart_with_their_rewards(server: PageServer, run: Path) -> None:
    turns = [("<b>", 0.25), (" four", None), ("<|end|>", -1.5)]
    said = [{"sampled": reward is not None, "text": text, "reward": reward} for text, reward in turns]
    rows = pa.Table.from_pylist([kept(6, 0, -1.25, sampled=[False, False, True, False, True])])
    path = run / "rollouts" / "step-6.parquet"
    pq.write_table(rows.append_column("turns", pa.array([said], TURNS)), path)
    text = opened(server, "/rollouts?step=6")[1]
    shown = re.findall(r'<b class="turn">(.*?)</b>', text)
    assert shown == ["turn 1: +0.25", "turn 2: -1.5"]
    assert '<b class="turn">' not in opened(server, "/rollouts?step=4")[1]


def test_a_secret_in_a_response_is_hidden(run: Path) -> None:
    write_rows(run, 6, [kept(6, 0, 1.0, response="use hf_abcdefghijklmnopqrstuvwx now")])
    [of_run] = rollouts_view({"one": (run, 1.0)}, Filters()).runs
    assert [(row.response, row.tokens) for row in of_run.groups[0].rows] == [("use *** now", [])]


def test_a_process_of_its_own_serves_the_page_and_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    page = PageProcess(run, PageSection(port=0))
    port = int(page.url.partition("/?")[0].rpartition(":")[2])
    try:
        assert page.url.endswith(f"/?token={TOKEN}") and get(port, "/")[0] == 403
        assert get(port, "/", Authorization=f"Bearer {TOKEN}")[0] == 200
        with pytest.raises(MonitorError, match=rf"monitor\.page: cannot listen on 127\.0\.0\.1:{port} "):
            PageProcess(run, PageSection(port=port))
    finally:
        page.close()
        page.close()
    with pytest.raises(ConnectionRefusedError):
        get(port, "/")


def test_tokens_are_long_and_ports_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({page_token() for _ in range(4)}) == 4 and len(page_token()) >= 32
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(MonitorError, match=f"the token in {TOKEN_VARIABLE} is not 16 printable"):
        page_token()
    with pytest.raises(RecipeError, match=r"page\.port=9400: is prometheus\.port too"):
        load_recipe(
            Path(__file__).parents[2] / "recipes/tiny_sft.yaml",
            ["monitor.page.port=9400", "monitor.trackers=[jsonl, prometheus]"],
        )


def test_what_cannot_be_watched_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch.main([str(tmp_path / "none")]) == 2
    assert f"error: {tmp_path / 'none'}: there is no such folder; give the folder of a run" in capsys.readouterr().err
