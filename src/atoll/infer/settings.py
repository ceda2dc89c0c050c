"""What an engine may use of its machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from atoll.config import UserError
from atoll.infer.pool import PAGE

MIB = 1 << 20


@dataclass(frozen=True)
class EngineSettings:
    """What an engine may use.

    Args:
        slots: sequences decoded at once.
        prefill_chunk: tokens of prompts read a turn, a multiple of 64.
        device_mib: memory on the model's device for latents and kept prefixes; slots' states come on top.
        host_mib: host memory for prefixes that the device has no room for.
        max_length: tokens of a sequence at most, prompt and answer.
        version: of the weights.
        speculate: where guesses of the next tokens come from: nowhere, the text itself, or a draft model.
        draft_tokens: how many are guessed at once.
    """

    slots: int = 8
    prefill_chunk: int = 256
    device_mib: float = 512.0
    host_mib: float = 512.0
    max_length: int = 32768
    version: int = 0
    speculate: Literal["none", "lookup", "draft"] = "none"
    draft_tokens: int = 4

    def check(self) -> None:
        """Raises `UserError` naming the first setting that cannot be."""
        if self.slots < 1:
            raise UserError(f"slots = {self.slots}: one at least is expected")
        if self.prefill_chunk < PAGE or self.prefill_chunk % PAGE:
            raise UserError(f"prefill_chunk = {self.prefill_chunk}: a multiple of {PAGE} is expected")
        if self.max_length < 1:
            raise UserError(f"max_length = {self.max_length}: one token at least is expected")
        if not 0 < self.device_mib < float("inf") or not 0 <= self.host_mib < float("inf"):
            raise UserError(f"device_mib = {self.device_mib}, host_mib = {self.host_mib}: MiB are expected, the device's above 0")
        if self.speculate not in ("none", "lookup", "draft"):
            raise UserError(f"speculate = {self.speculate!r}: none, lookup or draft is expected")
        if not 1 <= self.draft_tokens < PAGE:
            raise UserError(f"draft_tokens = {self.draft_tokens}: 1 to {PAGE - 1} are expected")


DEFAULTS = EngineSettings()
