"""`trellis bench serve`: sessions of `trellis serve` with Trellis and with attention, and peers.

Every server runs in a process of its own and is asked over HTTP, as any client would.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ..data.tokenizer import load_tokenizer
from ..models.modeling import TrellisForCausalLM
from .decoding import MIXERS, config

Report = Callable[[str], None]
#: Seconds that a server has to start.
STARTS = 600
PEER = "transformers serve, Llama"
#: Tokens that each idle session has read.
IDLE_TOKENS = 1000
#: The chat template that `transformers serve` needs.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class Server:
    """A server's address and process."""

    def __init__(self, process: subprocess.Popen[str], host: str, model: str):
        self.process, self.host, self.model = process, host, model

    def ask(self, path: str, body: Any = None, method: str = "") -> Any:
        """The answer as JSON; of a stream, the number of its events that bring text."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        link = http.client.HTTPConnection(self.host, timeout=7200)
        kind = "application/json" if isinstance(body, dict) else "application/octet-stream"
        headers = {"Content-Type": kind}
        link.request(method or ("POST" if body is not None else "GET"), path, data, headers)
        answer = link.getresponse()
        content = answer.read()
        link.close()
        if answer.status >= 400:
            raise RuntimeError(f"{path}: {answer.status} {content[:300]!r}")
        return json.loads(content)

    def resident(self) -> int:
        """Bytes of memory that the process has."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def ours(folder: Path, states: Path) -> Iterator[Server]:
    """`trellis serve` on a folder."""
    line = [sys.executable, "-m", "trellis.cli", "serve", str(folder), "--port", "0",
            "--state-dir", str(states), "--memory-mb", "8192"]  # fmt: skip
    with _process(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"http://(\S+?)/ ", first)
        if found is None:
            raise RuntimeError(f"trellis serve did not start: {first}")
        yield Server(process, found[1], folder.name)


@contextlib.contextmanager
def peer(folder: Path) -> Iterator[Server]:
    """`transformers serve` with continuous batching on a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("transformers")
    line = [str(program), "serve", str(folder), "--port", str(port), "--host", "127.0.0.1",
            "--device", "cpu", "--continuous-batching"]  # fmt: skip
    with _process(line, stdout=subprocess.DEVNULL) as process:
        server = Server(process, f"127.0.0.1:{port}", str(folder))
        end = time.monotonic() + STARTS
        while True:
            try:
                server.ask("/v1/models")
                break
            except RuntimeError:  # without the hub it cannot list models, but it answers
                break
            except (OSError, http.client.HTTPException):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("it did not start") from None
                time.sleep(0.5)
        yield server


@contextlib.contextmanager
def _process(line: list[str], stdout: int) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        line, stdout=stdout, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def save_ours(folder: Path, size: str, mixer: str) -> int:
    """A model with random weights, whose answers take as long as any; returns its parameters."""
    torch.manual_seed(0)
    model = TrellisForCausalLM(config(size, mixer))
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return sum(p.numel() for p in model.parameters())


def save_llama(folder: Path, size: str) -> int:
    """A Llama of the same shape as our model with attention."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    like = config(size, "transformer")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=like.vocab_size, hidden_size=like.hidden_size,
        num_hidden_layers=like.num_hidden_layers, intermediate_size=like.intermediate_size,
        num_attention_heads=like.num_attention_heads, tie_word_embeddings=True,
        max_position_embeddings=2**17, bos_token_id=256, eos_token_id=256, pad_token_id=256,
    ))  # fmt: skip
    model.save_pretrained(folder)
    inner = load_tokenizer("bytes").inner
    end = inner.id_to_token(256)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end, pad_token=end)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def rates(ask: Callable[[int], int], sessions: list[int], rounds: int) -> dict[int, list[float]]:
    """Tokens per second of so many sessions at once. ask(n): one answer, and its tokens."""
    ask(0)  # packs weights, compiles kernels
    found: dict[int, list[float]] = {count: [] for count in sessions}
    for _ in range(rounds):
        for count in sessions:
            barrier = threading.Barrier(count)

            def one(n: int, barrier: Any = barrier) -> int:
                barrier.wait()
                return ask(n)

            start = time.perf_counter()
            with ThreadPoolExecutor(count) as pool:
                tokens = sum(pool.map(one, range(count)))
            found[count].append(tokens / (time.perf_counter() - start))
    return found


def completion(server: Server, tokens: int) -> Callable[[int], int]:
    """Asks `trellis serve` for an answer of so many tokens."""

    def ask(n: int) -> int:
        body = {"prompt": f"session {n}: ", "max_tokens": tokens, "temperature": 1, "seed": n}
        return server.ask("/v1/completions", body)["usage"]["completion_tokens"]

    return ask


def chat(server: Server, tokens: int) -> Callable[[int], int]:
    """Asks `transformers serve`, which has no completions, for a message."""

    def ask(n: int) -> int:
        body = {"model": server.model, "max_tokens": tokens, "temperature": 1.0, "seed": n,
                "messages": [{"role": "user", "content": f"session {n}: "}]}  # fmt: skip
        return server.ask("/v1/chat/completions", body)["usage"]["completion_tokens"]

    return ask


def run(
    size: str, mixers: list[str], sessions: list[int], tokens: int, context: int, idle: int,
    rounds: int, with_peer: bool, report: Report,
) -> dict[str, Any]:  # fmt: skip
    """Measures every server in turn.

    tokens: of an answer. context: tokens of the session that is resumed. idle: sessions whose
    memory is measured.
    """
    report(f"{size}, {torch.get_num_threads()} threads, answers of {tokens} tokens, medians of "
           f"{rounds} rounds\n")  # fmt: skip
    heads = [f"tokens/s, {n} sessions" for n in sessions]
    report(f"| server | parameters | {' | '.join(heads)} | gain of batching "
           f"| resume after {context:,} tokens | read them again | ratio "
           "| memory of an idle session | its state |")  # fmt: skip
    report("|---" * (len(sessions) + 8) + "|")
    rows = []
    with tempfile.TemporaryDirectory(prefix="trellis-bench-") as place:
        for mixer in mixers:
            folder = Path(place) / mixer
            parameters = save_ours(folder, size, mixer)
            row = _ours(folder, sessions, tokens, context, idle, rounds)
            label = f"trellis serve, {MIXERS.get(mixer, mixer)}"
            rows.append({"server": label, "parameters": parameters, **row})
            _say(rows[-1], sessions, report)
        if with_peer:
            rows.append({"server": PEER, **_peer(Path(place), size, sessions, tokens, rounds)})
            _say(rows[-1], sessions, report)
    return {"size": size, "tokens": tokens, "context": context, "servers": rows}


def _ours(
    folder: Path, sessions: list[int], tokens: int, context: int, idle: int, rounds: int
) -> dict[str, Any]:
    states = folder.with_name(f"{folder.name}-states")
    row: dict[str, Any] = {}
    with ours(folder, states) as server:
        row["rates"] = rates(completion(server, tokens), sessions, rounds)
        before = server.resident()
        made = [
            server.ask("/v1/read?stream=false", (f"{n:04d} " * IDLE_TOKENS)[:IDLE_TOKENS].encode())
            for n in range(idle)
        ]
        row["idle_bytes"] = (server.resident() - before) / idle
        row["idle_state_bytes"] = made[-1]["bytes"]
        document = ("the quick brown fox jumps over the lazy dog\n" * (context // 44 + 1))[:context]
        start = time.perf_counter()
        kept = server.ask("/v1/read?stream=false", document.encode())
        row["read_seconds"] = time.perf_counter() - start
    with ours(folder, states) as server:  # another process, which finds the state in its file
        completion(server, 2)(0)
        start = time.perf_counter()
        body = {"state": kept["id"], "prompt": " ", "max_tokens": 1, "temperature": 0}
        server.ask("/v1/completions", body)
        row["resume_seconds"] = time.perf_counter() - start
    return row


def _peer(place: Path, size: str, sessions: list[int], tokens: int, rounds: int) -> dict[str, Any]:
    """What `transformers serve` can be asked for: it has no sessions to resume or to leave idle."""
    folder = place / "llama"
    row: dict[str, Any] = {"parameters": save_llama(folder, size)}
    try:
        with peer(folder) as server:
            row["rates"] = rates(chat(server, tokens), sessions, rounds)
    except (RuntimeError, OSError, KeyError, TypeError) as error:
        row["failed"] = f"does not run here: {error}"[:300]
    return row


def _say(row: dict[str, Any], sessions: list[int], report: Report) -> None:
    head = f"| {row['server']} | {row['parameters']:,} |"
    if "failed" in row:
        report(f"{head} {row['failed']} |" + " |" * (len(sessions) + 6))
        return
    medians = [statistics.median(row["rates"][count]) for count in sessions]
    cells = [f"{rate:,.1f}" for rate in medians] + [f"{medians[-1] / medians[0]:.2f}"]
    if "read_seconds" in row:
        resume, again = row["resume_seconds"], row["read_seconds"]
        cells += [f"{resume * 1e3:.0f} ms", f"{again:.1f} s", f"{again / resume:,.0f}",
                  f"{row['idle_bytes'] / 2**20:.2f} MiB",
                  f"{row['idle_state_bytes'] / 2**20:.2f} MiB"]  # fmt: skip
    else:
        cells += [""] * 5
    report(f"{head} {' | '.join(cells)} |")
