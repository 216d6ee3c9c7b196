"""Servers in processes of their own, and the official client to ask them with."""

import contextlib
import re
import signal
import subprocess
import threading

import pytest
import torch
from tests.support import command, environment

pytest.importorskip("fastapi", reason="trellis serve needs the extra `serve`")
openai = pytest.importorskip("openai", reason="the tests ask with OpenAI's client")
requests = pytest.importorskip("requests")

#: A conversation as text: every message between the name of its role and the end of a document.
TEMPLATE = """{%- for message in messages -%}
{{ message.role }}: {{ message.content }}<|endoftext|>
{%- endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}"""
#: Nothing here takes so long; a server that hangs fails the test.
PATIENCE = 300


def save_model(folder, mixer="trellis", seed=0, template=True, **fields):
    """A model with random weights and the tokenizer of bytes, as `trellis export` writes one."""
    from trellis import TrellisConfig, TrellisForCausalLM
    from trellis.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer("bytes")
    torch.manual_seed(seed)
    config = TrellisConfig(**{
        "vocab_size": tokenizer.vocab_size, "mixer": mixer, "hidden_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.1, **fields,
    })  # fmt: skip
    model = TrellisForCausalLM(config).eval()
    with torch.no_grad():  # the likeliest token is ASCII, and never ends the document
        model.model.embed_tokens.weight[128:] = 0
    model.save_pretrained(folder)
    tokenizer.save(folder)
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Served:
    """A running server."""

    def __init__(self, model, *options, env=None, key=None):
        line = command("serve", model, "--port", "0", *options)
        self.process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment(**(env or {})),
        )  # fmt: skip
        self.key = key
        limit = threading.Timer(PATIENCE, self.process.kill)
        limit.start()
        self.first = self.process.stdout.readline()
        limit.cancel()
        found = re.search(r"http://\S+?(?=/ )", self.first)
        if found is None:
            raise RuntimeError(self.first + self.process.communicate()[1])
        self.url = found[0]
        self.errors = []
        threading.Thread(
            target=lambda: self.errors.extend(self.process.stderr), daemon=True
        ).start()

    @property
    def client(self):
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=PATIENCE
        )

    def ask(self, method, path, **options):
        if self.key:
            options.setdefault("headers", {})["Authorization"] = f"Bearer {self.key}"
        return requests.request(method, self.url + path, timeout=PATIENCE, **options)

    def states(self):
        return {state["id"]: state for state in self.ask("GET", "/v1/states").json()["data"]}

    def metric(self, name):
        lines = self.ask("GET", "/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}(\{{| )", line))

    def stop(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)


@contextlib.contextmanager
def serving(model, *options, **more):
    server = Served(model, *options, **more)
    try:
        yield server
    finally:
        server.stop(signal.SIGKILL)


@pytest.fixture(scope="session", autouse=True)
def surroundings():
    """Neither a key nor a proxy of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRELLIS_API_KEY", "")
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1")
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("served") / "small")
