"""What requests may say: OpenAI's fields and the extensions that vLLM's clients know. Unknown fields are passed over."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from atoll.infer.request import Sampling

Logit = Annotated[float, Field(ge=-100, le=100)]
Id = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Stop | Annotated[list[Stop], Field(max_length=16)] | None
INT64 = 2**63


class Base(BaseModel):
    """Finite numbers; fields that nobody knows are no mistake."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class SamplingFields(Base):
    """The fields of `atoll.infer.request.Sampling`, flat in a request as everybody sends them. None is the default."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[Id, Logit], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None

    def sampling(self, choice: int = 0) -> Sampling:
        """The settings of one of several answers: with a seed, each has its own, the first the one given."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields if getattr(self, name) is not None}
        if given.get("top_k") in (-1, 0):
            del given["top_k"]
        if "seed" in given:
            given["seed"] = (given["seed"] + choice + INT64) % (2 * INT64) - INT64
        return Sampling(**given)


class StreamOptions(Base):
    """Whether a last chunk says how many tokens there were."""

    include_usage: bool = False


class Common(SamplingFields):
    """What chat and completion requests share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] | None = None
    return_token_ids: bool = False
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    user: str | None = None

    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def usage_wanted(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Common):
    """POST /v1/chat/completions. Messages, tools and formats are read by `atoll.data.chat`."""

    messages: list[Any] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def thinks(self, default: bool) -> bool:
        """Whether the assistant thinks first."""
        asked = self.chat_template_kwargs or {}
        for name in ("thinking", "enable_thinking"):
            if isinstance(asked.get(name), bool):
                return asked[name]
        return default and self.reasoning_effort != "none"

    def effort(self) -> str | None:
        """The effort in the chat format's words."""
        others = {"none": None, "minimal": "low", "xhigh": "max"}
        return others.get(self.reasoning_effort, self.reasoning_effort) if self.reasoning_effort else None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: str | list[Id] | list[str] | list[list[Id]]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True  # texts begin with the model's bos
    return_tokens_as_token_ids: bool = False


class GenerateSampling(SamplingFields):
    """`sampling_params` of /inference/v1/generate."""

    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    stop_token_ids: Annotated[list[Id], Field(max_length=64)] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None


class GenerateRequest(Base):
    """POST /inference/v1/generate: token ids in, token ids out."""

    request_id: Annotated[str, Field(max_length=256)] | None = None
    token_ids: list[Id] = Field(min_length=1)
    sampling_params: GenerateSampling = GenerateSampling()
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    return_routed_experts: bool = False


class TokenizeRequest(Base):
    """POST /tokenize: a text, or a conversation as the chat endpoint renders it."""

    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Base):
    """POST /detokenize."""

    tokens: list[Id]
