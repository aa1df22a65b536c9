"""The page in a real browser: its script runs and no other, texts stay texts, and panels fit a phone in the dark."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import watch

from chromium import CHROMIUM, Tab, browser
from rlhf_megatron.monitor.page import write_page
from rlhf_megatron.monitor.page_server import PageServer, url_of
from run_pages import kept, write_rows, write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium)")

FITS = (
    "(() => { const of = [...document.querySelectorAll('.box')].find(e => e.querySelector('h2').innerText === '%s')"
    ".querySelector('.wide'); return of.scrollWidth <= of.clientWidth; })()"
)
BAD = "</span></pre><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("runs") / "one", reward={"rule": "gsm8k"}, note=BAD)
    write_rows(folder, 4, [kept(4, group, 1.0, prompt=BAD, token_texts=["q", "?", BAD, " 4", "!"]) for group in (0, 1)])
    return folder


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[PageServer]:
    with watch.server_of([str(run)], "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def test_a_person_opens_looks_points_and_filters(server: PageServer, run: Path, tmp_path: Path) -> None:
    asyncio.run(look(server, run, tmp_path))


async def look(server: PageServer, run: Path, tmp_path: Path) -> None:
    async with browser(tmp_path / "browser") as tab:
        await tab.open(url_of("127.0.0.1", server.server_port, server.token))
        assert await tab.evaluate("location.search") == "", "the token has left the address"
        assert await tab.evaluate("document.cookie") == "", "and no script can read it"
        await newest_numbers_come(tab, run)
        await tab.point_at(".chart svg")
        assert (await tab.evaluate("document.getElementById('hover').textContent")).startswith("step ")
        for path in ("", "rollouts"):
            for width, scheme in ((1280, "light"), (390, "dark")):
                await tab.open(f"http://127.0.0.1:{server.server_port}/{path}", width, scheme=scheme)
                assert await tab.evaluate("document.documentElement.scrollWidth") == width, "nothing stands out"
                dark = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, dark[4:-1].split(","))) < 384) == (scheme == "dark")
        await texts_are_texts(tab)
        await tab.evaluate(
            "const only = document.querySelector('[name=only]'); only.value = 'wrong';"
            "only.dispatchEvent(new Event('change'))"
        )
        await tab.until("location.search.includes('only=wrong') && document.readyState === 'complete'")
        assert "No response fits." in await tab.evaluate("document.body.innerText")
        write_page({"one": run}, tmp_path / "report.html")
        await tab.open((tmp_path / "report.html").as_uri())
        await texts_are_texts(tab)
        stopped = [{"what": "stop", "step": 4, "why": "a reason that is far longer than a column of a phone is wide"}]
        other = write_run(tmp_path / "another-with-a-long-name", events=stopped, data={"train_files": ["/a/b/" * 9]})
        write_page({run.name: run, other.name: other}, tmp_path / "both.html")
        await tab.open((tmp_path / "both.html").as_uri(), 390)
        for table in ("Beside each other", "Where the recipes differ"):
            assert await tab.evaluate(FITS % table), "values of both runs are seen without moving them"
        assert not [complaint for complaint in tab.complaints if "favicon" not in complaint]


async def newest_numbers_come(tab: Tab, run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "reward/mean": 0.8125}) + "\n")
    await tab.until("document.body.innerText.includes('step 7 of 8')")
    assert "0.8125" in await tab.evaluate("document.body.innerText")


async def texts_are_texts(tab: Tab) -> None:
    assert await tab.evaluate("document.title") == "one"
    assert await tab.evaluate("document.images.length + document.scripts.length") == 1
    assert await tab.evaluate("document.querySelector('.tokens').textContent") == f"{BAD} 4!"
    await tab.point_at(".tokens span")
    assert "trainer logprob -0.999" in await tab.evaluate("document.getElementById('hover').textContent")
