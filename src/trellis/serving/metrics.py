"""What `/metrics` tells, in the format of Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """The counts of one server. Each has a registry of its own, so that servers do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        about: dict[str, Any] = {"registry": self.registry, "namespace": "trellis"}
        self.requests = Counter(
            "requests", "Requests by path and status.", ["path", "status"], **about
        )
        self.read_tokens = Counter("read_tokens", "Tokens of prompts and documents read.", **about)
        self.new_tokens = Counter("new_tokens", "Tokens drawn.", **about)
        self.waiting = Gauge("queue_length", "Requests that wait for a place.", **about)
        self.reading = Gauge("reading", "Requests whose text is being read.", **about)
        self.batch = Gauge("batch_size", "Sessions that are decoded together.", **about)
        self.step = Histogram(
            "step_seconds", "Time of one decoding step of all sessions.",
            buckets=STEP_SECONDS, **about,
        )  # fmt: skip
        self.states = Gauge("states", "States that can be named.", **about)
        self.disk_bytes = Gauge("state_file_bytes", "Bytes of state files.", **about)
        self.memory_bytes = Gauge("state_memory_bytes", "Bytes of states held in memory.", **about)
        self.evictions = Counter("evictions", "States dropped from memory for others.", **about)
        self.prefix_hits = Counter("prefix_hits", "Prompts whose beginning was known.", **about)
        self.prefix_misses = Counter("prefix_misses", "Prompts that were read whole.", **about)
        self.prefix_tokens = Counter(
            "prefix_tokens", "Tokens of prompts that did not have to be read.", **about
        )
        self.cancelled = Counter("cancelled", "Requests whose client went away.", **about)
