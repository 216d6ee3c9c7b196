"""A real server in a process of its own, asked by OpenAI's client."""

import contextlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from .conftest import openai, requests, save_model, serving

GREEDY = {"model": "small", "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def server(model, folder):
    with serving(model, "--state-dir", folder, "--max-request-mb", "1", "--segment", "32") as one:
        yield one


@pytest.fixture(scope="module")
def client(server):
    return server.client


def complete(client, prompt, *, state=None, return_state=True, **options):
    """A completion's text, and the state after it."""
    extra = {"return_state": return_state, **({"state": state} if state else {})}
    made = client.completions.create(**{**GREEDY, "prompt": prompt, **options}, extra_body=extra)
    (choice,) = made.choices
    return choice.text, (choice.model_extra or {}).get("state")


def test_the_model(client):
    (found,) = client.models.list().data
    assert found.id == "small"
    assert client.models.retrieve("small").model_extra["trellis"]["chat"] is True
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'; this server has"):
        client.models.retrieve("gpt")


def test_completions_are_those_of_trellis_generate(client, model):
    from trellis.models.sampling import generate
    from trellis.training.run import load_run

    network, tokenizer = load_run(model)
    expected = "".join(
        generate(network, tokenizer, "hello", network.init_cache(1), max_tokens=40, temperature=0)
    )
    made = client.completions.create(**GREEDY, prompt="hello", max_tokens=40)
    assert made.choices[0].text == expected
    assert made.choices[0].finish_reason == "length"
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (5, 40)
    ids = client.completions.create(**GREEDY, prompt=list(b"hello"), max_tokens=40)
    assert ids.choices[0].text == expected


def test_streams_say_the_same(client):
    options = {"prompt": "stream", "max_tokens": 30, "logprobs": 3}
    whole = client.completions.create(**GREEDY, **options)
    chunks = list(client.completions.create(
        **GREEDY, **options, stream=True, stream_options={"include_usage": True}
    ))  # fmt: skip
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens == 36
    streamed = [x for c in choices if c.logprobs for x in c.logprobs.token_logprobs]
    assert streamed == whole.choices[0].logprobs.token_logprobs


def test_logprobs(client, model):
    from trellis.training.run import load_run

    made = client.completions.create(**GREEDY, prompt="odds", max_tokens=3, logprobs=2)
    found = made.choices[0].logprobs
    network, _ = load_run(model)
    with torch.no_grad():
        logits = network(torch.tensor([list(b"odds")])).logits[0, -1]
    best = logits.log_softmax(-1).topk(2)
    assert found.token_logprobs[0] == pytest.approx(float(best.values[0]), abs=1e-4)
    assert sorted(found.top_logprobs[0].values(), reverse=True) == pytest.approx(
        best.values.tolist(), abs=1e-4
    )
    assert len(found.tokens) == len(found.text_offset) == 3


def test_seeds_draw_the_same_alone_and_in_a_batch(client):
    def draw(seed, **options):
        made = client.completions.create(
            model="small", prompt="dice", max_tokens=24, temperature=1.2, top_p=0.9, seed=seed,
            **options,
        )  # fmt: skip
        return [choice.text for choice in made.choices]

    alone = [draw(seed)[0] for seed in range(6)]
    assert len(set(alone)) == 6
    with ThreadPoolExecutor(6) as pool:
        assert [found[0] for found in pool.map(draw, range(6))] == alone
    assert draw(0, n=3) == alone[:3]


def test_stop(client):
    text, _ = complete(client, "until", max_tokens=40)
    stop = text[11:13]
    made = client.completions.create(**GREEDY, prompt="until", max_tokens=40, stop=[stop, "\0\0\0"])
    assert made.choices[0].text == text[: text.index(stop)]
    assert made.choices[0].finish_reason == "stop"
    chunks = client.completions.create(
        **GREEDY, prompt="until", max_tokens=40, stop=stop, stream=True
    )
    assert "".join(c.choices[0].text for c in chunks) == text[: text.index(stop)]


def test_a_state_goes_on_and_forks(client, server):
    whole, _ = complete(client, "once upon", max_tokens=20)
    first, state = complete(client, "once upon", max_tokens=8)
    rest, after = complete(client, "", state=state["id"], max_tokens=12)
    assert first + rest == whole
    assert (state["tokens"], after["tokens"]) == (17, 29)
    assert state["bytes"] == after["bytes"]
    assert after["parent"] == state["id"]
    one, _ = complete(client, " a", state=state["id"], max_tokens=12)
    two, _ = complete(client, " b", state=state["id"], max_tokens=12)
    again, _ = complete(client, " a", state=state["id"], max_tokens=12)
    assert one == again != two
    fork = server.ask("POST", f"/v1/states/{state['id']}/fork", json={"name": "branch"}).json()
    assert (fork["parent"], fork["name"], fork["tokens"]) == (state["id"], "branch", 17)
    assert complete(client, " a", state=fork["id"], max_tokens=12)[0] == one


def test_states_are_listed_renamed_and_deleted(client, server):
    _, state = complete(client, "keep me", max_tokens=4)
    path = f"/v1/states/{state['id']}"
    found = server.ask("GET", path).json()
    assert found["input"] == "keep me"
    assert len(found["fingerprint"]) == 64
    assert found["attention_bytes"] == found["tokens"] * 2 * 4 * 2 * 32
    assert server.ask("PATCH", path, json={"name": "mine"}).json()["name"] == "mine"
    assert server.states()[state["id"]]["name"] == "mine"
    assert server.ask("DELETE", path).json()["deleted"] is True
    assert server.ask("GET", path).status_code == 404
    with pytest.raises(openai.NotFoundError, match="there is no state"):
        complete(client, "x", state=state["id"])
    for prompt in ("one", "two"):
        complete(client, prompt, max_tokens=1)
    first, second = list(server.states())[:2]
    page = server.ask("GET", f"/v1/states?limit=1&after={first}").json()
    assert [one["id"] for one in page["data"]] == [second]


def test_a_state_is_a_file(client, server, tmp_path):
    _, state = complete(client, "send this", max_tokens=6)
    content = server.ask("GET", f"/v1/states/{state['id']}/content").content
    assert content[8:9] == b"{"  # safetensors
    made = server.ask("POST", "/v1/states?name=back", data=content)
    assert made.status_code == 201
    rest = [complete(client, "!", state=one, max_tokens=9)[0] for one in
            (state["id"], made.json()["id"])]  # fmt: skip
    assert rest[0] == rest[1]
    flipped = bytearray(content)
    flipped[-5] ^= 1
    refused = server.ask("POST", "/v1/states", data=bytes(flipped))
    assert refused.status_code == 400
    assert "checksum" in refused.json()["error"]["message"]
    for spoiled in (content[:-9], b"", b"not a state", content + b"x"):
        assert server.ask("POST", "/v1/states", data=spoiled).status_code == 400


def test_a_state_of_another_model_is_refused(server, tmp_path):
    from trellis.training.run import load_run

    other, _ = load_run(save_model(tmp_path / "other", seed=1))
    other.read(torch.tensor([[1, 2, 3]])).save(tmp_path / "state")
    refused = server.ask("POST", "/v1/states", data=(tmp_path / "state").read_bytes())
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "other_model"


def test_a_document_is_read_with_progress(client, server):
    document = "".join(f"line {n} of a long document\n" for n in range(400))
    answer = server.ask("POST", "/v1/read?name=book", data=document.encode(), stream=True)
    told = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: ")]
    steps = [one["tokens"] for one in told[:-1]]
    assert steps == sorted(steps)
    assert (len(steps), steps[-1]) == (-(-len(document) // 32), len(document))
    assert told[-2]["bytes"] == told[-2]["total_bytes"] == len(document)
    state = told[-1]["state"]
    assert (state["tokens"], state["name"], state["kind"]) == (len(document), "book", "read")
    after, _ = complete(client, "line", state=state["id"], max_tokens=10)
    at_once, _ = complete(client, document + "line", max_tokens=10)
    assert after == at_once
    more = server.ask("POST", f"/v1/read?stream=false&state={state['id']}", data=b"more")
    assert (more.status_code, more.json()["tokens"]) == (201, len(document) + 4)
    bad = server.ask("POST", "/v1/read?stream=false", data=b"\xff\xfe not text")
    assert (bad.status_code, bad.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "UTF-8" in bad.json()["error"]["message"]
    assert server.ask("POST", "/v1/read", data=b"").status_code == 400


def test_chat_goes_on_from_the_end_of_the_last_turn(client):
    messages = [{"role": "system", "content": "Be brief. " * 3}, {"role": "user", "content": "Hi"}]
    first = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=12)
    assert first.choices[0].message.role == "assistant"
    assert first.choices[0].finish_reason == "length"
    chunks = list(client.chat.completions.create(
        **GREEDY, messages=messages, max_completion_tokens=12, stream=True
    ))  # fmt: skip
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == first.choices[0].message.content
    other = [messages[0], {"role": "user", "content": "Another question"}]
    shared = client.chat.completions.create(**GREEDY, messages=other, max_tokens=3)
    system = len("system: " + "Be brief. " * 3) + 1 + len("user: ")
    assert shared.usage.prompt_tokens_details.cached_tokens == system
    told = client.chat.completions.create(
        **GREEDY, messages=messages, max_tokens=2, logprobs=True, top_logprobs=2
    )
    found = told.choices[0].logprobs.content
    assert [len(one.top_logprobs) for one in found] == [2, 2]
    assert found[0].logprob == max(top.logprob for top in found[0].top_logprobs)


def test_responses_fork_at_every_id(client, server):
    first = client.responses.create(**GREEDY, input="One", max_output_tokens=9)
    assert first.status == "incomplete"
    assert first.incomplete_details.reason == "max_output_tokens"
    assert first.output[0].content[0].text == first.output_text
    turns = [
        client.responses.create(
            **GREEDY, input=text, previous_response_id=first.id, max_output_tokens=9
        )
        for text in ("Two", "Three", "Two")
    ]
    assert turns[0].output_text == turns[2].output_text != turns[1].output_text
    assert len({turn.id for turn in turns}) == 3
    states = server.states()
    assert all(states[turn.id]["parent"] == first.id for turn in turns)
    # The same conversation, told at once.
    messages = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Two"},
    ]
    whole = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=9)
    if first.output_text.isascii():
        assert whole.choices[0].message.content == turns[0].output_text
    unkept = client.responses.create(**GREEDY, input="x", max_output_tokens=2, store=False)
    assert unkept.id not in server.states()


def test_responses_stream(client):
    whole = client.responses.create(
        **GREEDY, input="Go", instructions="Be kind.", max_output_tokens=9
    )
    events = list(client.responses.create(
        **GREEDY, input="Go", instructions="Be kind.", max_output_tokens=9, stream=True
    ))  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text
    assert events[-1].response.usage.output_tokens == 9


def test_a_stream_shows_the_memory(client):
    chunks = client.completions.create(
        **GREEDY, prompt="look", max_tokens=5, stream=True,
        extra_body={"memory": {"layer": 1, "head": 0}},
    )  # fmt: skip
    seen = [one for chunk in chunks for one in getattr(chunk.choices[0], "memory", None) or []]
    assert "".join(one["token"] for one in seen[:4]) == "look"
    assert len(seen) == 9
    assert all(0 < gate <= 1 for one in seen for gate in one["forget"])
    assert seen[-1]["picture"]["values"]["shape"] == [32, 64]
    with pytest.raises(openai.BadRequestError, match=r"memory.layer must be one of 0, 1; got 7"):
        client.completions.create(**GREEDY, prompt="x", extra_body={"memory": {"layer": 7}})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": "x", "max_token": 3},
            "there is no field 'max_token'; did you mean 'max_tokens'",
        ),
        ({"prompt": "x", "echo": True}, "echo is not supported by this server"),
        ({"prompt": "x", "temperature": -1}, "temperature: "),
        ({"prompt": "x", "n": 65}, "n: "),
        ({"prompt": ["x"] * 33, "n": 2}, "n times the number of prompts must be at most 64"),
        ({"prompt": [257]}, "prompt must have tokens below 257; got 257"),
        ({"prompt": {"a": 1}}, "prompt: "),
        ({"prompt": "x", "state": "../../etc/passwd"}, "there is no state"),
        ({"prompt": "x", "stop": ""}, "stop"),
        ([1], "the body"),
    ],
)
def test_what_is_wrong_is_named(server, body, message):
    answer = server.ask("POST", "/v1/completions", json=body)
    assert answer.status_code in (400, 404)
    assert message in answer.json()["error"]["message"]


def test_malformed_bodies(server):
    for data in (b"{", b"\xff", b'{"prompt": ' + b"[" * 100_000, b"", b'{"prompt": "\\ud800"}'):
        answer = server.ask("POST", "/v1/completions", data=data,
                            headers={"Content-Type": "application/json"})  # fmt: skip
        assert answer.status_code == 400, data[:20]
        assert answer.json()["error"]["message"]
    chat = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = server.ask("POST", "/v1/chat/completions", data=chat,
                        headers={"Content-Type": "application/json"})  # fmt: skip
    assert answer.status_code == 400
    large = server.ask("POST", "/v1/completions", data=b'{"prompt": "' + b"x" * 2**20 + b'"}',
                       headers={"Content-Type": "application/json"})  # fmt: skip
    assert large.status_code == 413


def test_other_sites_are_refused(server):
    for headers in ({"Origin": "https://example.org"}, {"Host": "example.org"}):
        answer = server.ask("POST", "/v1/read?stream=false", data=b"text", headers=headers)
        assert answer.status_code == 403
        assert "example.org" in answer.json()["error"]["message"]
    for host in ("localhost", "localhost.:80", "127.0.0.2:80", "[::1]:80"):
        assert server.ask("GET", "/v1/states", headers={"Host": host}).status_code == 200
    own = server.ask("GET", "/v1/states", headers={"Origin": server.url})
    assert own.status_code == 200


def test_the_page_and_its_files_need_nothing_from_outside(server):
    for path, kind in (
        ("/", "text/html"),
        ("/app.js", "text/javascript"),
        ("/style.css", "text/css"),
    ):
        answer = server.ask("GET", path)
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text
        assert "https://" not in answer.text


def test_health_and_metrics(client, server):
    before = server.metric("trellis_new_tokens_total")
    complete(client, "count", max_tokens=7, return_state=False)
    assert server.metric("trellis_new_tokens_total") == before + 7
    assert server.metric("trellis_states") == len(server.states())
    assert server.metric("trellis_state_memory_bytes") > 0
    assert server.metric("trellis_step_seconds_count") > 0
    assert server.ask("GET", "/health").json()["status"] == "ok"


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(server, stream):
    body = {"prompt": "endless", "max_tokens": 10**8, "stream": stream, "temperature": 0}
    running = lambda: server.ask("GET", "/health").json()["running"]  # noqa: E731
    if stream:
        answer = requests.post(f"{server.url}/v1/completions", json=body, stream=True, timeout=60)
        pieces = []

        def read():  # all the time: an answer that nobody reads is given up
            with contextlib.suppress(Exception):  # the connection is closed while it is read
                pieces.extend(answer.iter_lines())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        wait_until(lambda: running() == 1)
        assert reader.is_alive()
        answer.raw._fp.fp.raw._sock.shutdown(socket.SHUT_RDWR)
    else:
        with pytest.raises(requests.ReadTimeout):
            requests.post(f"{server.url}/v1/completions", json=body, timeout=1)
    wait_until(lambda: running() == 0)


def test_a_batch_over_http_answers_as_each_request_alone(client):
    prompts = [f"session {n} " * (n + 1) for n in range(12)]

    def ask(prompt):
        return client.completions.create(**GREEDY, prompt=prompt, max_tokens=24).choices[0].text

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_several_prompts_in_one_request(client):
    made = client.completions.create(**GREEDY, prompt=["first", "second"], max_tokens=8, n=2)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    texts = [choice.text for choice in made.choices]
    assert texts[0] == texts[1] == complete(client, "first", max_tokens=8)[0]
    assert texts[2] == complete(client, "second", max_tokens=8)[0]
    assert made.usage.completion_tokens == 32


def test_the_options_of_the_command(model, tmp_path):
    from typer.testing import CliRunner

    from trellis.cli import app

    def refused(*options, key=""):
        found = CliRunner().invoke(
            app, ["serve", str(model), *options], env={"TRELLIS_API_KEY": key}
        )
        assert found.exit_code == 1
        return str(found.exception)

    assert "lets other machines in: give an API key" in refused("--host", "0.0.0.0")
    assert "file:PATH or env:NAME" in refused("--api-key", "secret")
    assert "must hold a key" in refused("--api-key", "env:NOT_SET")
    assert "env:TRELLIS_API_KEY must hold a key" in refused(key="with spaces")
    assert "cannot be read" in refused("--api-key", f"file:{tmp_path}/none")
    gone = CliRunner().invoke(app, ["serve", str(tmp_path / "none")])
    assert "there is no run" in str(gone.exception)
