"""What takes longer: crashes, full disks, many clients, hostile ones, and a browser.

`make test-serve` runs these and lets none of them skip.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support import make_corpus, recipe, run_command

from .conftest import PATIENCE, openai, requests, save_model, serving
from .test_server import GREEDY, complete, wait_until

pytestmark = pytest.mark.slow


def test_64_streams_at_once(model):
    """All are answered, together, and each as it would be alone."""
    with serving(model, "--sessions", "64") as server:
        prompts = [f"stream {n}: " + "abc " * (n % 7) for n in range(64)]
        start = threading.Barrier(64, timeout=PATIENCE)
        running = []

        def ask(prompt):
            start.wait()
            chunks = server.client.completions.create(
                **GREEDY, prompt=prompt, max_tokens=96, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in chunks)

        def watch():
            while not done.wait(0.1):
                with contextlib.suppress(requests.RequestException):
                    running.append(server.ask("GET", "/health").json()["running"])

        done = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(64) as pool:
            together = list(pool.map(ask, prompts))
        done.set()
        watcher.join()
        assert max(running) > 16  # more than the decoder takes in one call
        client = server.client
        for n in range(0, 64, 9):
            assert complete(client, prompts[n], max_tokens=96, return_state=False)[0] == together[n]


def test_every_acknowledged_state_survives_kill_9(model, tmp_path):
    acknowledged = {}
    with serving(model, "--state-dir", tmp_path) as server:
        stop = threading.Event()

        def write(number):
            client, state = server.client, None
            with contextlib.suppress(openai.APIError, requests.RequestException):
                while not stop.is_set():
                    _, made = complete(client, f"{number} ", state=state, max_tokens=3)
                    acknowledged[made["id"]] = made["tokens"]
                    state = made["id"]

        writers = [threading.Thread(target=write, args=(n,)) for n in range(6)]
        for writer in writers:
            writer.start()
        wait_until(lambda: len(acknowledged) > 60, PATIENCE)
        server.process.send_signal(signal.SIGKILL)  # in the middle of it
        server.process.wait()
        stop.set()
        for writer in writers:
            writer.join()
    with serving(model, "--state-dir", tmp_path) as server:
        found = server.states()
        assert {name: found[name]["tokens"] for name in acknowledged} == acknowledged
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
        for name in list(acknowledged)[::7]:
            complete(server.client, "more", state=name, max_tokens=2)
        assert f"states in {tmp_path}: {len(found)}" in server.first


def test_sigterm_lets_answers_finish(model, tmp_path):
    with serving(model, "--state-dir", tmp_path, "--grace", "120") as server:
        chunks = server.client.completions.create(
            **GREEDY,
            prompt="finish",
            max_tokens=400,
            stream=True,
            extra_body={"return_state": True},
        )
        first = next(iter(chunks))
        server.process.send_signal(signal.SIGTERM)
        rest = list(chunks)
        assert rest[-1].choices[0].finish_reason == "length"
        state = rest[-1].choices[0].model_extra["state"]
        assert state["tokens"] == 406
        assert first.choices[0].finish_reason is None
        assert server.process.wait(PATIENCE) == 0
    assert (tmp_path / f"{state['id']}.json").is_file()


def test_sigterm_just_after_the_address_was_told(model):
    with serving(model) as server:
        assert server.stop() == 0


def test_sigterm_cuts_and_saves_what_takes_too_long(model, tmp_path):
    with serving(model, "--state-dir", tmp_path, "--grace", "1") as server:
        events = server.client.responses.create(
            **GREEDY, input="endless", max_output_tokens=10**7, stream=True
        )
        for event in events:
            if event.type == "response.output_text.delta":
                break
        server.process.send_signal(signal.SIGTERM)
        last = list(events)[-1]
        assert last.type == "response.incomplete"
        assert last.response.model_extra["cut"] == "shutdown"
        assert server.process.wait(PATIENCE) == 0
    with serving(model, "--state-dir", tmp_path) as server:
        assert last.response.id in server.states()
        again = server.client.responses.create(
            **GREEDY, input="go on", previous_response_id=last.response.id, max_output_tokens=3
        )
        assert again.previous_response_id == last.response.id


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of so many bytes; skips where this process may not mount one."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_refuses_states_and_goes_on_serving(model, tmp_path):
    with (
        small_disk(tmp_path / "disk", 2**20) as folder,
        serving(model, "--state-dir", folder) as server,
    ):
        client, kept = server.client, {}

        def fill():
            for n in range(1000):
                _, state = complete(client, f"state {n}", max_tokens=2)
                kept[state["id"]] = state["tokens"]

        with pytest.raises(openai.APIStatusError) as refused:
            fill()
        assert refused.value.status_code == 507
        assert "full" in refused.value.message
        assert len(kept) > 3
        # Without a state, all is as before; states that are there can be used.
        assert complete(client, "no state", max_tokens=5, return_state=False)[0]
        name = next(iter(kept))
        again = client.completions.create(
            **GREEDY, prompt="x", max_tokens=5, extra_body={"state": name}
        )
        assert again.choices[0].finish_reason == "length"
        for method, path, data in (
            ("POST", "/v1/read?stream=false", b"a document"),
            ("POST", f"/v1/states/{name}/fork", None),
        ):
            answer = server.ask(method, path, data=data)
            assert answer.status_code in (201, 507), answer.text
        # A file that fills the rest: the check before the answer passes, and the write fails.
        found = server.states()
        assert {one: found[one]["tokens"] for one in kept} == kept
        for one in list(kept)[:4]:
            server.ask("DELETE", f"/v1/states/{one}")
        assert complete(client, "room again", max_tokens=2)[1]["id"] in server.states()
        server.stop(signal.SIGKILL)
        with serving(model, "--state-dir", folder) as again:
            assert set(list(kept)[4:]) <= set(again.states())


def test_a_write_that_fails_keeps_nothing(model, tmp_path, monkeypatch):
    """In this process: the disk is full in the middle of the file."""
    import errno

    import torch

    from trellis.serving import states
    from trellis.serving.metrics import Metrics
    from trellis.training.run import load_run

    network, _ = load_run(model)
    store = states.Store(network, Metrics(), folder=tmp_path)

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(states, "write_json", full)
    cache = network.read(torch.tensor([[1, 2]]))
    with pytest.raises(states.NoRoom, match="is full"):
        store.add(cache, states.State.of(cache, "read"))
    assert (store.list(), list(tmp_path.iterdir())) == ([], [])
    store.close()


def test_the_key(model, tmp_path):
    (tmp_path / "key").write_text("correct-horse-battery\n")
    options = ("--host", "0.0.0.0", "--api-key", f"file:{tmp_path / 'key'}")
    with serving(model, *options, key="correct-horse-battery") as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert complete(server.client, "x", max_tokens=2)[0] is not None
        for wrong in ("", "correct-horse-batter", "correct-horse-battery2", "ü"):
            headers = {"Authorization": f"Bearer {wrong}".encode()}
            for path in ("/v1/states", "/v1/models", "/metrics", "/openapi.json", "/nothing"):
                answer = requests.get(server.url + path, headers=headers, timeout=PATIENCE)
                assert answer.status_code == 401, path
        for scheme, status in (("bearer ", 200), ("", 401)):
            headers = {"Authorization": f"{scheme}correct-horse-battery"}
            answer = requests.get(server.url + "/v1/states", headers=headers,
                                  timeout=PATIENCE)  # fmt: skip
            assert answer.status_code == status
        assert requests.get(server.url + "/v1/states", timeout=PATIENCE).status_code == 401
        assert requests.get(server.url + "/health", timeout=PATIENCE).status_code == 200
        assert requests.get(server.url + "/", timeout=PATIENCE).status_code == 200
        listed = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(server.process.pid)],
                                capture_output=True, text=True)  # fmt: skip
        assert "correct-horse" not in listed.stdout
    with serving(model, env={"TRELLIS_API_KEY": "from-the-environment"}) as server:
        assert server.ask("GET", "/v1/models").status_code == 401
        server.key = "from-the-environment"
        assert server.ask("GET", "/v1/models").status_code == 200


def endless_body(server, path, head=""):
    """Sends 10 GB in chunks, or as many as the server takes: how many it was, and the answer."""
    host, port = server.url.removeprefix("http://").split(":")
    block = b"x" * 2**20
    sent = 0
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as link:
        link.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Transfer-Encoding: chunked\r\n{head}\r\n".encode()
        )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < 10 * 2**30:
                link.sendall(b"%x\r\n" % len(block) + block + b"\r\n")
                sent += len(block)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := link.recv(2**16):
                answer += part
    return sent, answer


def test_10_gb_are_cut_off_at_the_limit(model, tmp_path):
    with serving(model, "--state-dir", tmp_path, "--max-document-mb", "4") as server:
        for path in ("/v1/states", "/v1/completions", "/v1/read"):
            sent, answer = endless_body(server, path)
            assert sent < 2**30, path  # as much as came while the rest of the body was awaited
            assert b" 413 " in answer.split(b"\r\n")[0], path
            told = server.ask("POST", path, data=iter([b"x" * 2**20] * 40))
            assert told.status_code == 413
        assert not list(tmp_path.iterdir())
        peak = Path(f"/proc/{server.process.pid}/status")
        (line,) = [x for x in peak.read_text().splitlines() if x.startswith("VmHWM")]
        assert int(line.split()[1]) < 2 * 2**20  # KiB
        assert complete(server.client, "still here", max_tokens=2)


def test_a_full_queue_is_told_with_the_time_to_wait(model):
    with serving(model, "--sessions", "1", "--queue", "1") as server:
        body = {"prompt": "endless", "max_tokens": 10**8, "stream": True, "temperature": 0}
        one = requests.post(
            f"{server.url}/v1/completions", json=body, stream=True, timeout=PATIENCE
        )
        lines = one.iter_lines()  # kept: where it is dropped, the connection is closed
        next(lines)
        waiting = threading.Thread(
            target=lambda: server.ask("POST", "/v1/completions", json={"prompt": "w"})
        )
        waiting.start()
        wait_until(lambda: server.ask("GET", "/health").json()["waiting"] == 1, PATIENCE)
        refused = server.ask("POST", "/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        one.close()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        wait_until(lambda: server.ask("GET", "/health").json()["running"] == 0, PATIENCE)
        assert server.ask("POST", "/v1/completions", json={"prompt": "x"}).status_code == 200


def test_time_per_request(model):
    with serving(model, "--max-seconds", "2") as server:
        made = server.ask("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 10**8,
                                                           "temperature": 0})  # fmt: skip
        (choice,) = made.json()["choices"]
        assert (choice["finish_reason"], choice["cut"]) == ("length", "time")


def test_a_model_without_a_template_says_so(tmp_path):
    plain = save_model(tmp_path / "plain", template=False)
    with serving(plain) as server:
        client = server.client
        message = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            client.chat.completions.create(model="plain", messages=message)
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            client.responses.create(model="plain", input=message)
        first = client.responses.create(model="plain", input="plain text", max_output_tokens=5)
        again = client.responses.create(model="plain", input=" goes on", max_output_tokens=5,
                                        previous_response_id=first.id)  # fmt: skip
        assert server.states()[again.id]["tokens"] == 10 + 5 + 8 + 5


@pytest.mark.parametrize("mixer", ["transformer", "mamba2"])
def test_other_mixers_are_served_too(tmp_path, mixer):
    with serving(save_model(tmp_path / "other", mixer), "--state-dir", tmp_path / "s") as server:
        client = server.client
        options = {"model": "other", "temperature": 0}
        whole = client.completions.create(**options, prompt="abc", max_tokens=12).choices[0].text
        part = client.completions.create(
            **options, prompt="abc", max_tokens=5, extra_body={"return_state": True}
        ).choices[0]
        state = part.model_extra["state"]["id"]
        content = server.ask("GET", f"/v1/states/{state}/content").content
        back = server.ask("POST", "/v1/states", data=content).json()["id"]
        rest = (
            client.completions.create(
                **options, prompt="", max_tokens=7, extra_body={"state": back}
            )
            .choices[0]
            .text
        )
        assert part.text + rest == whole


def test_500_drawn_requests_find_no_server_error(model, tmp_path):
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, settings

    options = ("--state-dir", tmp_path, "--max-seconds", "0.5", "--max-request-mb", "1")
    with serving(model, *options) as server:
        _, state = complete(server.client, "a state to draw requests about", max_tokens=4)
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        statuses = []
        operations = list(schema.get_all_operations())
        each = 60  # some operations have one request only
        for operation in operations:
            found = operation.ok()

            @settings(max_examples=each, deadline=None, derandomize=True, database=None,
                      suppress_health_check=list(HealthCheck), phases=[Phase.generate])  # fmt: skip
            @found_cases(found)
            def check(case):
                if len(statuses) % 2 and "state" in (case.path_parameters or {}):
                    case.path_parameters["state"] = state["id"]
                answer = case.call(base_url=server.url, timeout=PATIENCE)
                statuses.append((case.method, case.path, answer.status_code))
                assert answer.status_code < 500 or answer.status_code in (503, 504), answer.text

            check()
        assert len(statuses) >= 500
        assert len({status for *_, status in statuses}) > 2
        assert not [line for line in server.errors if "Traceback" in line]
        assert server.ask("GET", "/health").json()["status"] == "ok"


def found_cases(operation):
    """Requests by the schema, and requests that are not."""
    from hypothesis import given, strategies
    from schemathesis import GenerationMode

    kinds = [operation.as_strategy(generation_mode=mode) for mode in
             (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]  # fmt: skip
    return given(case=strategies.one_of(kinds))


def test_the_command_that_the_demo_prints(tmp_path, monkeypatch):
    """The last line of `make demo`, for a small run in place of the demo's."""
    from trellis.training.run import train

    source = Path(__file__).parents[2] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo", source)
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    run = tmp_path / "runs" / "demo" / "trellis"
    run.parent.mkdir(parents=True)
    train(recipe(make_corpus(tmp_path / "data"), train={"steps": 2}), run)
    program, verb, *arguments = demo.serve_command(run).split()
    assert (program, verb) == (".venv/bin/trellis", "serve")
    with serving(*arguments) as server:
        assert "<title>Trellis</title>" in server.ask("GET", "/").text
        assert complete(server.client, "import ", model="trellis", max_tokens=5)[1]["tokens"] == 12


# The page, in a browser.


@pytest.fixture
def browser():
    selenium = pytest.importorskip("selenium.webdriver")
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if not all(programs):
        pytest.skip("no chromium and chromedriver: apt-get install chromium chromium-driver")
    options = selenium.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu",
                     "--window-size=1360,900"):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = selenium.ChromeService(programs[1])
    driver = selenium.Chrome(options=options, service=service)
    yield driver
    driver.quit()


def test_the_page(model, tmp_path, browser):
    """Open, send, watch tokens stream, fork, reload, go on; read a file; rename; delete."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    def find(name):
        return browser.find_element(By.ID, name)

    def idle():
        return not find("stop").is_displayed()

    def answer_question(text):
        wait_until(lambda: find("ask").get_attribute("open") is not None, PATIENCE)
        if text is not None:
            find("asked").clear()
            find("asked").send_keys(text)
        find("confirm").click()

    def sessions():
        items = browser.find_elements(By.CSS_SELECTOR, "#tree .item")
        return [item.text.splitlines()[0] for item in items]

    with serving(model, "--state-dir", tmp_path / "states") as server:
        browser.get(server.url)
        wait_until(lambda: "parameters" in find("model").text, PATIENCE)
        browser.find_element(By.CSS_SELECTOR, "input[value=complete]").click()
        find("tokens").clear()
        find("tokens").send_keys("80")
        find("temperature").clear()
        find("temperature").send_keys("0")
        find("prompt").send_keys("hello page")
        find("prompt").send_keys(Keys.CONTROL, Keys.ENTER)  # by keyboard alone
        lengths = set()
        wait_until(lambda: find("stop").is_displayed() or len(server.states()) == 1, PATIENCE)
        while not idle():
            lengths.add(len(find("text").text))
            time.sleep(0.02)
        assert len(lengths) > 2  # it grew before one's eyes
        wait_until(lambda: sessions() == ["hello page" + find("text").text[10:].split("\n")[0][:50]]
                   or len(sessions()) == 1, PATIENCE)  # fmt: skip
        text = find("text").text
        (expected, _) = complete(server.client, "hello page", max_tokens=80, return_state=False)
        assert text.split() == ("hello page" + expected).split()
        assert find("memory").is_displayed()
        assert len(browser.find_elements(By.CSS_SELECTOR, "#words tr")) == 6
        drawn = browser.execute_script(
            "const c = document.getElementById('slots');"
            "return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(x => x)"
        )
        assert drawn
        assert "90 tokens" in find("ours").text

        find("fork").click()
        answer_question("a branch")
        wait_until(lambda: "a branch" in sessions() and len(sessions()) == 2, PATIENCE)
        browser.refresh()
        wait_until(lambda: find("title").text == "a branch", PATIENCE)
        wait_until(lambda: find("text").text.split() == text.split(), PATIENCE)
        find("tokens").clear()
        find("tokens").send_keys("10")
        find("prompt").send_keys(" and on")
        find("send").click()
        wait_until(lambda: len(server.states()) == 3 and idle(), PATIENCE)
        wait_until(lambda: "107 tokens" in find("ours").text, PATIENCE)
        assert len(sessions()) == 2

        document = tmp_path / "document.txt"
        document.write_text("a line of the document\n" * 300)
        browser.execute_script("document.getElementById('read-file').hidden = false")
        find("read-file").send_keys(str(document))
        wait_until(lambda: "document.txt is read" in find("status").text, PATIENCE)
        size = 107 + 300 * 23
        wait_until(lambda: f"{size:,} tokens" in find("ours").text, PATIENCE)

        find("rename").click()
        answer_question("renamed")
        wait_until(lambda: "renamed" in sessions(), PATIENCE)
        find("delete").click()
        answer_question(None)
        wait_until(lambda: "renamed" not in sessions() and len(sessions()) == 1, PATIENCE)

        # With the arrow keys to the other session.
        item = browser.find_element(By.CSS_SELECTOR, "#tree li")
        item.send_keys(Keys.ENTER)
        wait_until(lambda: find("text").text.split() == text.split(), PATIENCE)

        state = next(iter(server.states()))
        content = tmp_path / "sent.safetensors"
        content.write_bytes(server.ask("GET", f"/v1/states/{state}/content").content)
        browser.execute_script("document.getElementById('upload-file').hidden = false")
        find("upload-file").send_keys(str(content))
        wait_until(lambda: "sent" in sessions(), PATIENCE)

        browser.set_window_size(500, 900)  # a phone
        wait_until(lambda: find("toggle-sessions").is_displayed(), PATIENCE)
        assert not find("tree").is_displayed()
        find("toggle-sessions").click()
        assert find("tree").is_displayed()
        wide = browser.execute_script("return document.documentElement.scrollWidth > innerWidth")
        assert not wide
        errors = [e for e in browser.get_log("browser") if e["level"] == "SEVERE"]
        assert not errors
        shot = os.environ.get("TRELLIS_SCREENSHOT")
        if shot:
            browser.save_screenshot(shot)


def test_the_benchmark_measures_both_mixers():
    from trellis.bench import serve

    lines = []
    result = serve.run(
        "demo", ["trellis", "transformer"], [1, 2], 4, 200, 2, 1, False, lines.append
    )
    assert [row["server"] for row in result["servers"]] == [
        "trellis serve, Trellis", "trellis serve, attention",
    ]  # fmt: skip
    for row in result["servers"]:
        assert all(rate > 0 for rates in row["rates"].values() for rate in rates)
        assert row["resume_seconds"] > 0
    trellis, attention = (row["idle_state_bytes"] for row in result["servers"])
    assert attention > trellis
    assert len(lines) == 5


def test_serving_needs_its_packages():
    """The command says which extra to install."""
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from trellis.cli import main; sys.argv = ['trellis', 'serve', 'x']; main()"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'trellis-memory[cli,serve]'" in out.stderr
    assert "serve" in run_command("serve", "--help").stdout
