"""Shared by all requests: the model, service, limits, keys and metrics of one server."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.run import UserError
from shardwise.serve.grammar import Grammars
from shardwise.serve.request import Request
from shardwise.serve.server.ask import Ask
from shardwise.serve.server.errors import ApiError
from shardwise.serve.server.limits import Limits
from shardwise.serve.server.metrics import Metrics
from shardwise.serve.server.model import Model
from shardwise.serve.service import Service


@dataclass
class Context:
    """One server."""

    model: Model
    service: Service
    limits: Limits = field(default_factory=Limits)
    keys: tuple[str, ...] = ()
    """API keys, any of which grants access; if empty, everybody has access."""
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.grammars = Grammars(self.model.tokenizer, self.service.vocab, self.model.ends)

    async def requests(self, ask: Ask, name: str, prompts: Sequence[Sequence[int]]) -> list[Request]:
        """The requests to the engine. A grammar is compiled in a thread, so that the event loop does not block."""
        longest = self.service.max_tokens
        if ask.form is None:
            return ask.requests(name, prompts, longest, self.grammars)
        try:
            return await asyncio.to_thread(ask.requests, name, prompts, longest, self.grammars)
        except UserError as e:
            raise ApiError(400, f"'{ask.problem}' {e}", ask.problem, "invalid_value") from None

    def user_of(self, authorization: str) -> str:
        """The user's name by the API key; empty if the key does not distinguish users. Raises `ApiError` for a wrong key."""
        if not self.keys:
            return ""
        kind, _, given = authorization.partition(" ")
        # Headers are read as Latin-1, so a key that is not ASCII arrives as the Latin-1 letters of its bytes, UTF-8's or Latin-1's.
        sent = given.strip().encode("utf-8", "surrogateescape")
        raw = given.strip().encode("latin-1", "backslashreplace")
        # Every key is compared, in a time that does not depend on how much of it was right.
        found = [hmac.compare_digest(sent, key.encode()) | hmac.compare_digest(raw, key.encode()) for key in self.keys]
        if kind.lower() != "bearer" or not any(found):
            reason = "Incorrect API key provided." if authorization else "You did not provide an API key."
            raise ApiError(401, f"{reason} Send it as 'Authorization: Bearer KEY'.", code="invalid_api_key")
        # With a single key, the request's own user name decides how users share the engine.
        return f"key {found.index(True)}" if len(self.keys) > 1 else ""
