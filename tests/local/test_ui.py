"""`ddpjob ui`: the pages over the runs of this machine, also in a real browser without a window."""

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from html import unescape
from http.cookiejar import CookieJar
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, Request, build_opener

import pytest
import yaml

from ddpjob.cli.commands.ui import listen
from ddpjob.client import ClientError, NotFound
from ddpjob.client.local import LocalClient
from ddpjob.local.run_files import LOCK
from ddpjob.ui.app import server
from ddpjob.ui.sources import LocalSource

TOKEN = "t0ken"
SECONDS = 60

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

JOB = {
    "apiVersion": "ddpjob.dev/v1alpha1",
    "kind": "DDPJob",
    "metadata": {"name": "digits"},
    "spec": {"image": "i", "args": ["train.py"], "nodes": 2},
}
STATUS = {
    "phase": "Failed",
    "reason": "MaxRestartsExceeded",
    "message": "maxRestarts=1 is used up: rank 1: ValueError: <bad> batch",
    "conditions": [{"type": "Failed", "status": "True"}],
    "attempt": {"number": 1},
    "restarts": 1,
    "budget": {"failures": 1},
    "attempts": [
        {
            "attempt": number,
            "cause": "Failure",
            "rank": 1,
            "message": "ValueError: <bad> batch",
            "start": f"2026-01-01T12:0{number}:00Z",
            "end": f"2026-01-01T12:0{number}:30Z",
        }
        for number in (1, 0)
    ],
    "nodes": {"desired": 2},
}
EVENTS = "".join(f'{{"event": "train", "step": {step}, "loss": 1.0}}\n' for step in (10, 20))


@pytest.fixture
def runs(tmp_path):
    """Return a folder with one run, as `ddpjob run --local` leaves it."""
    run = tmp_path / "digits"
    (run / "logs").mkdir(parents=True)
    (run / "job.yaml").write_text(yaml.safe_dump(JOB))
    (run / "status.yaml").write_text(yaml.safe_dump(STATUS))
    (run / "metrics.jsonl").write_text(EVENTS)
    (run / "logs" / "digits-1-0.log").write_text(EVENTS)
    (run / "logs" / "digits-1-1.log").write_text("<script>document.title = 'run'</script>\n")
    return tmp_path


@contextmanager
def running(folder):
    """Hold the lock of a run, as its process does."""
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


class Browser:
    """A browser with cookies, as far as a test needs one."""

    def __init__(self, address):
        self.address = address
        self.opener = build_opener(HTTPCookieProcessor(CookieJar()))

    def get(self, path, **headers):
        """Return the status, the headers and the text of a page."""
        request = Request(self.address + path, headers=headers)
        try:
            with self.opener.open(request, timeout=SECONDS) as answer:
                return answer.status, answer.headers, answer.read().decode()
        except HTTPError as error:
            return error.code, error.headers, error.read().decode()

    def text(self, path):
        """Return a page without its tags."""
        _, _, page = self.get(path)
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


@pytest.fixture
def serve():
    """Return a function to serve a source. It returns a browser without a cookie."""
    servers = []

    def start(source, token=TOKEN):
        listening = listen(0)
        found = server(source, token)
        thread = threading.Thread(target=found.run, args=([listening],))
        thread.start()
        servers.append((found, thread))
        return Browser(f"http://127.0.0.1:{listening.getsockname()[1]}")

    yield start
    for found, thread in servers:
        found.should_exit = True
        thread.join(SECONDS)


@pytest.fixture
def browser(serve, runs):
    """Open the printed address in a browser, and return it."""
    found = serve(LocalSource(LocalClient(runs)))
    found.get(f"/?token={TOKEN}")
    return found


# Who may read


def test_without_the_token_nothing_is_shown(serve, runs):
    found = serve(LocalSource(LocalClient(runs)))
    for path in ("/", "/jobs/-/digits", "/static/live.js", "/?token=wrong", "/?token=%C3%A9"):
        status, _, text = found.get(path)
        assert (status, "digits" in text) == (403, False), path


def test_the_token_leaves_the_address_and_becomes_a_cookie(browser):
    status, headers, text = browser.get("/")
    assert (status, TOKEN in text) == (200, False)
    assert "default-src 'self'" in headers["Content-Security-Policy"]


def test_two_programs_on_two_ports_keep_their_cookies_apart(serve, runs):
    first = serve(LocalSource(LocalClient(runs)))
    second = Browser(serve(LocalSource(LocalClient(runs)), token="other").address)
    second.opener = first.opener
    first.get(f"/?token={TOKEN}")
    second.get("/?token=other")
    assert (first.get("/")[0], second.get("/")[0]) == (200, 200)


def test_a_page_of_another_site_gets_no_answer_under_its_own_name(browser):
    # The name of an attacker's site may be resolved to 127.0.0.1.
    assert browser.get("/", Host="attacker.example")[0] == 400


def test_another_user_of_the_network_cannot_connect():
    with listen(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


# What is shown


def test_the_list_has_each_job_with_a_link(browser):
    assert "digits Failed 0/2 1" in browser.text("/")
    assert 'href="/jobs/-/digits"' in browser.get("/")[2]


def test_a_job_has_its_reason_attempts_curves_and_log(browser):
    text = browser.text("/jobs/-/digits")
    assert "MaxRestartsExceeded: maxRestarts=1 is used up" in text
    assert "1 Failure 30s rank 1 ValueError: <bad> batch" in text
    assert "step 20, loss 1.0000" in text
    page = browser.get("/jobs/-/digits")[2]
    assert re.search(r'<a href="https://[^"]*#reason-maxrestartsexceeded">', page)
    # Each attempt lasted for a third of the time, and the second one began after two thirds.
    bars = re.findall(r'<rect class="Failure" x="([\d.]+)" width="([\d.]+)"', page)
    assert [(float(x), round(float(width))) for x, width in bars] == [
        (0.0, 333),
        (pytest.approx(666.7, abs=0.1), 333),
    ]
    (curves,) = re.findall(r'src="(/jobs/[^"]*)"', page)
    _, headers, picture = browser.get(curves)
    assert headers["Content-Type"] == "image/svg+xml"
    assert "<svg" in picture


def test_a_job_that_trains_has_its_step_in_the_list(serve, runs):
    status = {"phase": "Running", "attempt": {"number": 0}, "attempts": []}
    (runs / "digits" / "status.yaml").write_text(yaml.safe_dump(status))
    found = serve(LocalSource(LocalClient(runs)))
    found.get(f"/?token={TOKEN}")
    with running(runs / "digits"):
        assert "digits Running 0/2 0 20" in found.text("/")


def test_a_run_that_was_killed_has_ended_when_it_wrote_for_the_last_time(browser, runs):
    status = {
        "phase": "Running",
        "attempt": {"number": 0, "start": "2026-01-01T12:00:00Z"},
        "account": {"activity": "training", "since": "2026-01-01T12:00:10Z"},
        "nodes": {"desired": 2, "ready": 2},
    }
    (runs / "digits" / "status.yaml").write_text(yaml.safe_dump(status))
    ended = datetime(2026, 1, 1, 12, 1, tzinfo=UTC).timestamp()
    for name in ("status.yaml", "metrics.jsonl"):
        os.utime(runs / "digits" / name, (ended, ended))
    text = browser.text("/jobs/-/digits")
    assert "attempt 0: Stopped, 60s" in browser.get("/jobs/-/digits")[2]
    assert "training 50 s" in text
    assert "0/2 ready" in text


def test_a_log_ends_with_the_newest_attempt(browser, runs):
    for attempt in (2, 9, 10):
        log = runs / "digits" / "logs" / f"digits-{attempt}-0.log"
        log.write_text(f"of attempt {attempt}\n")
    (runs / "digits" / "logs" / "notes.log").write_text("not a pod's\n")
    text = browser.text("/jobs/-/digits")
    assert "of attempt 2 of attempt 9 of attempt 10" in text
    assert "not a pod's" not in text


def test_only_the_end_of_a_long_log_is_shown(browser, runs):
    lines = "".join(f"line {number}\n" for number in range(200_000))
    (runs / "digits" / "logs" / "digits-1-0.log").write_text(lines)
    text = browser.text("/jobs/-/digits")
    assert "line 199700 " in text
    assert "line 199699 " not in text


def test_a_progress_bar_is_one_line_of_a_log(browser, runs):
    bar = "".join(f"\r{percent}% of an epoch" for percent in range(100))
    log = runs / "digits" / "logs" / "digits-1-0.log"
    log.write_text(f"before\n{bar}\nafter\x0b\u2028\n", newline="")
    text = browser.text("/jobs/-/digits")
    assert "before 99% of an epoch after" in text
    assert "98% of an epoch" not in text


def test_a_second_run_of_a_job_has_a_page_of_its_own(browser, runs):
    shutil.copytree(runs / "digits", runs / "digits.2")
    (runs / "digits.2" / "logs" / "digits-1-0.log").write_text("the second\n")
    assert 'href="/jobs/-/digits.2"' in browser.get("/")[2]
    assert "the second" in browser.text("/jobs/-/digits.2")
    assert "the second" not in browser.text("/jobs/-/digits")


@pytest.mark.parametrize("text", [b"", b"[1]", b"kind: Pod", b"a: [", b"\xff", b"a: 2026-13-45"])
def test_a_folder_without_a_job_hides_no_other(browser, runs, text):
    (runs / "other").mkdir()
    (runs / "other" / "job.yaml").write_bytes(text)
    assert "digits" in browser.text("/")
    assert browser.get("/jobs/-/other")[0] == 404


def test_a_fault_of_the_program_itself_has_a_sentence(serve, runs):
    class Broken(LocalSource):
        async def jobs(self):
            raise RuntimeError("no more memory")

    found = serve(Broken(LocalClient(runs)))
    found.get(f"/?token={TOKEN}")
    status, headers, _ = found.get("/")
    assert (status, "Content-Security-Policy" in headers) == (500, True)
    assert "ddpjob ui has failed; the terminal shows where: RuntimeError" in found.text("/")


def test_many_nodes_are_chosen_by_their_number(browser, runs):
    job = {**JOB, "spec": {**JOB["spec"], "nodes": 200}}
    (runs / "digits" / "job.yaml").write_text(yaml.safe_dump(job))
    page = browser.get("/jobs/-/digits?node=199")[2]
    assert 'name="node" min="0" max="199" value="199"' in page
    assert page.count("?node=") == 0


def test_what_a_job_prints_stays_text(browser):
    page = browser.get("/jobs/-/digits?node=1")[2]
    assert "&lt;script&gt;document.title" in page
    assert "<script>document" not in page


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/jobs/-/digit", "not found in"),
        ("/jobs/-/digits?node=2", "job digits has 2 nodes, from 0 on"),
        ("/jobs/-/digits?node=-1", "expected the index of a node, got '-1'"),
        ("/jobs/-/digits?node=" + "9" * 5000, "expected the index of a node"),
        ("/jobs/-/..%2f..%2fetc", "Not Found"),
        ("/jobs/-/%2e%2e", "not found in"),
        ("/jobs/-/%00", "not found in"),
        ("/static/..%2fapp.py", "Not Found"),
    ],
)
def test_an_address_that_does_not_exist_says_why(browser, path, sentence):
    assert browser.get(path)[0] == 404
    assert sentence in browser.text(path)


@pytest.mark.parametrize("name", ["..", "", ".", "digits/../digits"])
def test_a_name_that_leads_out_of_the_folder_is_no_job(runs, name):
    (runs / "job.yaml").write_text(yaml.safe_dump(JOB))
    (runs / "runs").mkdir()
    with pytest.raises(NotFound):
        LocalClient(runs / "runs").get(name)
    with pytest.raises(NotFound):
        LocalClient(runs).delete(name)


def test_a_run_without_figures_has_no_curves(browser, runs):
    (runs / "digits" / "metrics.jsonl").unlink()
    assert "Curves" not in browser.text("/jobs/-/digits")
    assert browser.get("/jobs/-/digits/curves.svg")[0] == 404


def test_nothing_can_be_changed(browser):
    request = Request(browser.address + "/jobs/-/digits", method="DELETE")
    with pytest.raises(HTTPError) as refused:
        browser.opener.open(request, timeout=SECONDS)
    assert refused.value.code == 405


# In a real browser


class Changing(LocalSource):
    """A source with a job that changes at each look."""

    def __init__(self, client, folder):
        super().__init__(client)
        self.folder = folder
        self.looks = 0

    async def job(self, namespace, name):
        self.looks += 1
        status = {**STATUS, "message": f"look number {self.looks}"}
        (self.folder / "digits" / "status.yaml").write_text(yaml.safe_dump(status))
        return await super().job(namespace, name)


def rendered(address, folder, seconds):
    """Return the page as Chromium shows it after so many seconds of its own clock."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--virtual-time-budget={1000 * seconds}", f"--user-data-dir={folder}", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS)
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium")
def test_a_browser_shows_changes_and_runs_no_code_of_a_job(serve, runs, tmp_path):
    source = Changing(LocalClient(runs), runs)
    found = serve(source)
    address = f"{found.address}/jobs/-/digits?token={TOKEN}"
    page = rendered(address, tmp_path / "profile", 10)
    # The page itself, its curves, and a refresh every 3 s.
    (number,) = re.findall(r"look number (\d+)", page)
    assert int(number) >= 3
    assert "<title>digits: Failed</title>" in page
    # The log of node 1 would change the title.
    page = rendered(address.replace("?", "?node=1&"), tmp_path / "profile", 5)
    assert "&lt;script&gt;document.title = 'run'" in page
    assert "<title>digits: Failed</title>" in page
    assert "No answer" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium")
def test_a_page_that_is_left_open_says_what_the_cluster_answers(serve, runs, tmp_path):
    class Failing(LocalSource):
        looks = 0

        async def job(self, namespace, name):
            self.looks += 1
            if self.looks > 1:
                raise ClientError("the API server does not answer")
            return await super().job(namespace, name)

    found = serve(Failing(LocalClient(runs)))
    page = rendered(f"{found.address}/jobs/-/digits?token={TOKEN}", tmp_path / "profile", 8)
    assert '<output id="problem">the API server does not answer</output>' in page
    # What was known stays.
    assert "MaxRestartsExceeded" in page


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt install chromium")
def test_a_page_that_is_left_open_says_that_the_program_has_ended(runs, tmp_path):
    class Ending(LocalSource):
        looks = 0

        async def job(self, namespace, name):
            self.looks += 1
            pages.should_exit = self.looks == 2
            return await super().job(namespace, name)

    listening = listen(0)
    port = listening.getsockname()[1]
    pages = server(Ending(LocalClient(runs)), TOKEN)
    thread = threading.Thread(target=pages.run, args=([listening],))
    thread.start()
    page = rendered(f"http://127.0.0.1:{port}/jobs/-/digits?token={TOKEN}", tmp_path / "p", 12)
    thread.join(SECONDS)
    assert "No answer: ddpjob ui has ended" in page
    assert "MaxRestartsExceeded" in page


# The command


def ui(*words):
    command = [sys.executable, "-m", "ddpjob.cli.main", "ui", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_prints_an_address_and_ends_at_ctrl_c(runs):
    with ui("--runs", str(runs), "--port", "0") as process:
        line = process.stdout.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/(\?token=\S+)", line)
        assert f"folder {runs}" in line
        browser = Browser(found[1])
        assert browser.get("/" + found[2])[0] == 200
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (130, "")


def test_a_port_that_is_in_use_is_named(runs):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with ui("--runs", str(runs), "--port", str(port)) as process:
            _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert f"port {port} cannot be used: Address already in use" in " ".join(errors.split())
