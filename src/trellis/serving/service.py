"""A model and all that serves it, and how clients see the two."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from ..data.tokenizer import TextTokenizer
from ..models.modeling import TrellisForCausalLM
from .chat import ChatTemplate
from .engine import Engine
from .errors import ApiError
from .metrics import Metrics
from .observer import trellis_layers
from .states import State, Store


@dataclass
class Limits:
    """What one request may take. request_bytes: of a JSON body. upload_bytes: of an uploaded state.
    document_bytes: of a document to read; 0 for any. seconds: of a request, from queue to end."""

    request_bytes: int = 16 * 2**20
    upload_bytes: int = 2**30
    document_bytes: int = 0
    seconds: float = 3600.0


@dataclass
class Service:
    """A model, and all that serves it. key: None lets in who names this machine, or `host`."""

    name: str
    model: TrellisForCausalLM
    tokenizer: TextTokenizer
    template: ChatTemplate | None
    store: Store
    engine: Engine
    metrics: Metrics
    limits: Limits = field(default_factory=Limits)
    key: str | None = None
    host: str = "127.0.0.1"
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def attention_bytes(self) -> int:
        """Bytes per token of the keys and values that attention of this width would keep."""
        config = self.model.config
        return 2 * 4 * config.num_hidden_layers * config.hidden_size

    def check_model(self, model: str | None) -> None:
        """Raises ApiError at the name of another model; None stands for the one that there is."""
        if model is not None and model != self.name:
            raise ApiError(404, f"there is no model {model!r}; this server has {self.name!r}",
                           "model", "model_not_found")  # fmt: skip

    def about_model(self) -> dict[str, Any]:
        """The model as clients see it."""
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "trellis",
            "trellis": {
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "fingerprint": self.store.fingerprint,
                "state_bytes": None if self.engine.grows else self.model.init_cache(1).nbytes,
                "attention_bytes_per_token": self.attention_bytes,
                "memory_layers": trellis_layers(self.model),
                "chat": self.template is not None,
                "kept_on_disk": self.store.folder is not None,
            },
        }  # fmt: skip

    def about_state(self, state: State, short: bool = False) -> dict[str, Any]:
        """A state as clients see it. short: without its texts."""
        text = (state.input + state.output).strip()
        found = {
            "id": state.id, "object": "state", "created": int(state.created), "model": self.name,
            "kind": state.kind, "name": state.name, "parent": state.parent,
            "tokens": state.tokens, "bytes": state.bytes,
            "attention_bytes": state.tokens * self.attention_bytes,
            "fingerprint": state.fingerprint, "ended": state.ended, "preview": text[:80],
        }  # fmt: skip
        return found if short else {**found, "input": state.input, "output": state.output}
