"""The front page in a real browser: a token, a sequence, the queue, progress, and the page of results."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from fastfold.inference.report.html_page import page_file
from fastfold.inference.report.molstar import load_molstar
from fastfold.products.serve import Client
from fastfold.products.serve.page import front_page
from fastfold.products.serve.request import PROGRESS
from fastfold.products.serve.service import Service
from fastfold.products.serve.tokens import Links
from tests.helpers.axe import axe_program, set_scheme, violations
from tests.helpers.browser import Browser
from tests.inference.report.test_style import TEXT, text_colors
from tests.products.serve.stub import fold, serving
from tests.products.serve.test_app import ADA, BOB, ask

HOSTILE = "<img src=x onerror='window.attacked = 1'>"
ROWS = (
    "[...document.querySelectorAll('#jobs tbody tr')]"
    ".map((row) => [...row.cells].slice(0, 4).map((one) => one.textContent))"
)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, Service]]:
    """A server with two users, which folds each job in a moment."""
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(f"ada {ADA}\nbob {BOB}\n")
    tokens.chmod(0o600)
    with serving(tmp_path / "data", tokens=tokens) as found:
        yield found


def text(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({json.dumps(selector)}).textContent"))


def shown(browser: Browser, part: str) -> None:
    browser.wait(f"document.getElementById('{part}')?.hidden === false")


def sign_in(browser: Browser, token: str) -> None:
    shown(browser, "entry")
    browser.type("#token", token)
    browser.click("#entry button")


def submit(browser: Browser, sequences: str, **fields: Any) -> None:
    shown(browser, "work")
    browser.type("#text", sequences)
    for name, value in fields.items():
        browser.evaluate(f"document.getElementById({name!r}).value = {json.dumps(value)}")
    browser.click("#fold")


def test_the_page_of_a_proxy_is_named_by_its_status(browser: Browser, guarded: tuple[str, Service]) -> None:
    browser.open(guarded[0])
    shown(browser, "entry")
    browser.evaluate("window.fetch = async () => new Response('<html>Bad Gateway</html>', {status: 502}); 0")
    sign_in(browser, ADA)
    browser.wait("!document.getElementById('problem').hidden")
    assert text(browser, "#problem") == "The server cannot be reached (status 502); the page tries again."


def test_a_user_signs_in_pastes_a_sequence_and_sees_own_jobs_only(
    browser: Browser, guarded: tuple[str, Service]
) -> None:
    server, _ = guarded
    bobs = Client(server, BOB).submit("MKV", name="of_bob")
    browser.open(server)
    sign_in(browser, "wrong" * 5)
    browser.wait("!document.getElementById('problem').hidden")
    assert text(browser, "#problem") == "This token is unknown."
    assert len(browser.messages) == 1  # the browser's own line about the answer with 401
    browser.messages.clear()
    sign_in(browser, ADA)
    shown(browser, "work")
    assert text(browser, "#facts") == "ada · 0 waiting, 0 running · 1 worker"
    assert (browser.evaluate(ROWS), text(browser, "#jobs-count")) == ([], "none yet")
    submit(browser, f">{HOSTILE}\nMKVLA\n>second\nMKLL\n", seeds=2, recycles=1)
    browser.wait("document.querySelectorAll('#jobs [data-state=done]').length === 2")
    assert text(browser, "#answer") == "2 jobs submitted"
    rows = browser.evaluate(ROWS)
    assert rows[0] == ["second", "4", "done", "MKLL"]
    assert rows[1][1:] == ["5", "done", "MKVLA"]
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    jobs = Client(server, ADA).jobs()
    assert [job["residues"] for job in jobs] == [5, 4]
    assert bobs["id"] not in json.dumps(jobs)
    # The page of results opens without the token, and cannot read it.
    page = browser.evaluate("document.querySelector('#jobs tbody a').href")
    assert ask(server, "GET", page.removeprefix(server)) == (200, b"<html></html>")
    assert browser.evaluate("sessionStorage.length") == 1
    browser.click("#jobs tbody tr:nth-child(1) button")
    assert text(browser, "#jobs tbody button") == "remove?"
    browser.click("#jobs tbody tr:nth-child(1) button")
    browser.wait("document.querySelectorAll('#jobs tbody tr').length === 1")
    browser.click("#leave")
    shown(browser, "entry")
    assert browser.evaluate("[sessionStorage.length, document.getElementById('work').hidden]") == [0, True]
    assert browser.evaluate(ROWS) == []
    assert browser.messages == []
    assert all(url.startswith((f"{server}/", "data:,")) for url in browser.requests)


def test_the_queue_progress_and_refusals_are_shown(browser: Browser, tmp_path: Path) -> None:
    released = threading.Event()

    def hold(number: int, task: Any) -> Any:
        for folder in task.job.payload:
            (folder / PROGRESS).write_text("first: recycle 1/3 pLDDT 70.0\nfirst: rec")
            released.wait(60)
        return fold(number, task)

    with serving(tmp_path, hold, group=1) as (server, _), contextlib.ExitStack() as stack:
        stack.callback(released.set)
        browser.open(server)
        submit(browser, "MKVLA", name="first")
        browser.wait(
            "document.querySelector('#jobs [data-state=running] .wide')?.textContent.startsWith('first')"
        )
        assert browser.evaluate(ROWS) == [["first", "5", "running", "first: recycle 1/3 pLDDT 70.0"]]
        submit(browser, "MKV:MKL", name="second")
        browser.wait("document.querySelectorAll('#jobs tbody tr').length === 2")
        browser.wait("document.getElementById('text').value === ''")
        submit(browser, "MKVAA", name="third")
        browser.wait("document.querySelectorAll('#jobs tbody tr').length === 3")
        assert browser.evaluate(ROWS)[:2] == [
            ["third", "5", "queued", "1 job before it"],
            ["second", "6", "queued", "next"],
        ]
        browser.wait("document.getElementById('facts').textContent.startsWith('2 waiting, 1 running')")
        for letters, problem in (("MK1V", "digit '1' at position 3"), ("M" * 501, "501 residues would need")):
            submit(browser, letters)
            browser.wait("document.getElementById('answer').className === 'poor'")
            assert problem in text(browser, "#answer")
            assert browser.evaluate("document.getElementById('text').value") == letters
        for _ in range(2):
            browser.click("#jobs tbody tr:nth-child(1) button")
        browser.wait("document.querySelector('#jobs [data-state=cancelled]') !== null")
        released.set()
        browser.wait("document.querySelectorAll('#jobs [data-state=done]').length === 2")
    assert not [one for one in browser.messages if "400 (Bad Request)" not in one]


def test_the_text_is_described_and_becomes_the_right_jobs(browser: Browser, tmp_path: Path) -> None:
    """Chains, records, one complex of all records, and an alignment, whose rows are no jobs."""
    with serving(tmp_path) as (server, service):
        browser.open(server)
        shown(browser, "work")
        cases: tuple[tuple[str, dict[str, bool], str, list[int]], ...] = (
            ("MKVLA:MKL", {}, "1 sequence, 8 residues in 2 chains; one job", [8]),
            (">a\nMKV\n>b\nMK\nLL", {}, "2 records, 7 residues; 2 jobs, one each", [3, 4]),
            (">a\nMKV\n>b\nMKLL", {"complex": True}, "2 records, 7 residues; one job", [7]),
            (
                ">a\nMKVLAMKV\n>h\nMK-LAMK-\n>i\nMKV-AMKV",
                {},
                "an alignment of 3 rows, 8 residues; one job",
                [8],
            ),
        )
        residues: list[int] = []
        for sequences, checked, described, jobs in cases:
            browser.evaluate(f"document.getElementById('complex').checked = {json.dumps(bool(checked))}")
            browser.type("#text", sequences)
            assert text(browser, "#said") == described
            browser.click("#fold")
            residues += jobs
            browser.wait(f"document.querySelectorAll('#jobs [data-state=done]').length === {len(residues)}")
        assert [job.residues for job in service.queue.jobs()] == residues
        submit(browser, "".join(f">r{k}\nMKV\n" for k in range(101)))
        browser.wait("document.getElementById('answer').className === 'poor'")
        assert text(browser, "#answer") == "The text has 101 records; submit at most 100 at once."
    assert browser.messages == []


def test_the_page_is_shut_and_each_control_has_a_name(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as (server, _):
        for width in (390, 1280):
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=900,
                deviceScaleFactor=1,
                mobile=False,
            )
            browser.open(server)
            shown(browser, "work")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "textbox", "spinbutton", "combobox", "checkbox", "region", "form")
        named = [one for one in nodes if one.get("role", {}).get("value") in roles and not one.get("ignored")]
        assert len(named) > 12
        assert [one["role"]["value"] for one in named if not one.get("name", {}).get("value")] == []
        assert browser.messages == []
        browser.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=\"x\" onerror=\"window.attacked = 1\">');"
            "fetch('http://127.0.0.1:9/').catch(() => {})"
        )
        time.sleep(0.3)
        assert browser.evaluate("window.attacked === undefined")
        assert browser.messages
        assert all("Content Security Policy" in one or "violates" in one for one in browser.messages)


def test_the_policy_names_the_script_of_the_page() -> None:
    with_tokens, without = front_page(has_tokens=True), front_page(has_tokens=False)
    assert 'data-tokens="yes"' in with_tokens.html
    assert 'data-tokens="no"' in without.html
    assert with_tokens.policy == without.policy
    assert "unsafe" not in with_tokens.policy
    assert "http" not in with_tokens.policy


def test_its_text_has_colours_whose_contrast_is_tested() -> None:
    colors = text_colors(page_file("front.css", "fastfold.products.serve"))
    assert {"ink", "soft", "poor"} <= colors <= {ink for ink, _ in TEXT}


def test_a_link_is_of_one_job_one_server_and_two_days(monkeypatch: pytest.MonkeyPatch) -> None:
    links, job, other = Links(), "0" * 32, "1" * 32
    link = links.sign(job)
    assert links.job(link) == job
    assert links.sign(job) == link
    assert Links().job(link) is None
    day = link.split("-")[1]
    for forged in (
        link.replace(job, other),
        link.replace(f"-{day}-", f"-{int(day) + 1}-"),
        link[:-1] + ("0" if link[-1] != "0" else "1"),
        job,
        "",
    ):
        assert links.job(forged) is None
    now = time.time()
    monkeypatch.setattr("fastfold.products.serve.tokens.time.time", lambda: now + 86_400)
    assert links.job(link) == job
    monkeypatch.setattr("fastfold.products.serve.tokens.time.time", lambda: now + 2 * 86_400)
    assert links.job(link) is None


def test_results_are_shown_by_link_and_by_nothing_else(guarded: tuple[str, Service]) -> None:
    server, service = guarded
    job = Client(server, ADA).wait(Client(server, ADA).submit("MKV")["id"])
    place = job["page"].rpartition("/")[0]
    assert ask(server, "GET", f"{place}/model.pdb") == (200, b"REMARK MKV\n")
    for path in (
        f"{place}/.hidden",
        f"{place}/answer.json",
        f"{place}/..%2f..%2fqueue.sqlite",
        place[:-1] + "/model.pdb",
    ):
        assert ask(server, "GET", path)[0] == 404
    assert ask(server, "GET", f"/v1/jobs/{job['id']}/page")[0] == 401
    assert ask(server, "GET", "/v1/server")[0] == 401
    Client(server, ADA).remove(job["id"])
    assert ask(server, "GET", f"{place}/model.pdb")[0] == 404
    assert service.links.job(place.rpartition("/")[2]) == job["id"]


@pytest.mark.slow
def test_from_pasting_to_a_structure(browser: Browser, tmp_path: Path) -> None:
    """A server of its own with the shipped network and tokens; the page of results has its structure and its files."""
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(f"ada {ADA}\n")
    tokens.chmod(0o600)
    command = [sys.executable, "-m", "fastfold", "serve", "--data", str(tmp_path / "data"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--tokens", str(tokens), "--device", "cpu"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        server = next(line for line in lines if line.startswith("serving on ")).split()[2].rstrip(",")
        browser.open(server)
        sign_in(browser, ADA)
        submit(browser, ">1igd\nMTPAVTTYKLVINGKTLKGETTTKAVDAETAEKAFKQYANDNGVDGVWTYDDATKTFTVTE\n", recycles=0)
        browser.wait("document.querySelector('#jobs [data-state=done] a') !== null", 120)
        assert "pLDDT" in text(browser, "#jobs .wide")
        page = browser.evaluate("document.querySelector('#jobs a').href")
        browser.open(page)
        browser.wait("document.body && document.body.dataset.ready")
        assert text(browser, "#name") == "1igd"
        if load_molstar() is not None:
            browser.wait("document.getElementById('view').dataset.shown === '61'", 120)
        files = browser.evaluate("[...document.querySelectorAll('#files a')].map((one) => one.href)")
        assert any(one.endswith(".pdb") for one in files)
        for file in files:
            assert ask(server, "GET", file.removeprefix(server))[0] == 200
        assert (
            browser.evaluate("(() => { try { return sessionStorage.length } catch { return 'no' } })()")
            == "no"
        )
        assert browser.messages == []
        assert all(url.startswith((f"{server}/", "data:", "blob:")) for url in browser.requests)
    finally:
        process.terminate()
        process.wait()


@pytest.mark.long
def test_the_page_keeps_the_rules_of_accessibility(browser: Browser, guarded: tuple[str, Service]) -> None:
    """Before and after signing in, with jobs in the list."""
    axe_program()
    server, _ = guarded
    for scheme in ("light", "dark"):
        set_scheme(browser, scheme)
        browser.open(server)
        shown(browser, "entry")
        assert violations(browser) == [], scheme
        sign_in(browser, ADA)
        submit(browser, "MKVLA")
        browser.wait("document.querySelectorAll('#jobs [data-state=done]').length > 0")
        assert violations(browser) == [], scheme
        browser.click("#leave")
        shown(browser, "entry")
    assert browser.messages == []
