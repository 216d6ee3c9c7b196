"""What requests may say. Fields that the server does not know, or does not support, are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Id = Annotated[str, StringConstraints(max_length=64)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=500)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
#: The most answers of one request.
MOST_ANSWERS = 64


class Place(BaseModel):
    """The layer and the head whose memory is shown."""

    model_config = ConfigDict(extra="forbid")

    layer: Annotated[int, Field(ge=0, lt=10_000)] = 0
    head: Annotated[int, Field(ge=0, lt=10_000)] = 0


class Request(BaseModel):
    """What all requests for text have in common.

    unsupported: fields of OpenAI's interface, with the values at which they change nothing.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str | None = Field(None, max_length=1000)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=1, le=10**9, description="Beyond OpenAI's interface.")
    stream: bool | None = None
    user: str | None = Field(None, max_length=10_000)
    memory: Place | None = Field(
        None, description="Beyond OpenAI's interface: shows a memory with every streamed token."
    )

    @model_validator(mode="before")
    @classmethod
    def without_unsupported(cls, data: Any) -> Any:
        """Takes out fields that change nothing, so that those that would are refused by name."""
        if not isinstance(data, dict):
            return data
        kept = dict(data)
        for name, plain in UNSUPPORTED.items():
            if name not in cls.model_fields and name in kept:
                value = kept.pop(name)
                if not any(value == one and type(value) is type(one) for one in (None, *plain)):
                    raise ValueError(f"{name} is not supported by this server")
        return kept


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "background": (False,), "best_of": (1,), "conversation": (), "echo": (False,),
    "frequency_penalty": (0, 0.0), "function_call": ("none", "auto"), "functions": ([],),
    "include": ([],), "logit_bias": ({},), "logprobs": (), "max_tool_calls": (), "metadata": ({},),
    "modalities": (["text"],), "n": (1,), "parallel_tool_calls": (True, False), "prediction": (),
    "presence_penalty": (0, 0.0), "prompt": (), "prompt_cache_key": (),
    "prompt_cache_retention": (), "reasoning": ({},), "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},), "safety_identifier": (), "seed": (),
    "service_tier": ("auto", "default"), "stop": ([],), "store": (False,), "suffix": ("",),
    "text": ({}, {"format": {"type": "text"}}), "tool_choice": ("none", "auto"), "tools": ([],),
    "top_logprobs": (0,), "truncation": ("auto", "disabled"), "verbosity": (),
    "web_search_options": (),
}  # fmt: skip


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Request):
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(Sampled):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MOST_ANSWERS)]
        | list[Token]
        | Annotated[list[list[Token]], Field(max_length=MOST_ANSWERS)]
        | None
    ) = None
    max_tokens: int | None = Field(None, ge=0, le=10**9)
    logprobs: int | None = Field(None, ge=0, le=20)
    state: Id | None = Field(
        None, description="Beyond OpenAI's interface: the state that the prompt goes on from."
    )
    return_state: bool | None = Field(
        None, description="Beyond OpenAI's interface: keeps the state after every answer."
    )
    name: Name | None = Field(None, description="Beyond OpenAI's interface: the new state's name.")


class ContentPart(BaseModel):
    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "input_text", "output_text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = Field(None, max_length=200)
    type: Literal["message"] | None = None
    id: str | None = Field(None, max_length=200)
    status: str | None = Field(None, max_length=200)

    def plain(self) -> dict[str, str]:
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return {"role": self.role, "content": text}


class ChatRequest(Sampled):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_tokens: int | None = Field(None, ge=1, le=10**9)
    max_completion_tokens: int | None = Field(None, ge=1, le=10**9)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class ResponseRequest(Request):
    """POST /v1/responses"""

    input: str | Annotated[list[Message], Field(min_length=1, max_length=10_000)] | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=10**9)
    seed: Seed | None = Field(None, description="Beyond OpenAI's Responses interface.")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="Beyond OpenAI's Responses interface."
    )
    store: bool | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    name: Name | None = Field(None, description="Beyond OpenAI's interface: the new state's name.")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Rename(BaseModel):
    """PATCH /v1/states/{id} and POST /v1/states/{id}/fork"""

    model_config = ConfigDict(extra="forbid")

    name: Name | None = None
