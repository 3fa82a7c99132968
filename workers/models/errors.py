"""Errors of the engines.

ModelError
├── ModelRefused        the model cannot be run exactly: choose another, the reason says why
├── ModelFilesMissing   the directory is no complete model: convert or download it again
├── EngineNotKnown      no engine has this name: choose one of those named
├── TokenNotKnown       a token id outside the vocabulary: the caller has another tokenizer
└── PoolNotBound        `forward` before `make_pool`: a fault of the caller
"""

from __future__ import annotations


class ModelError(Exception):
    """An engine cannot do what was asked."""


class ModelRefused(ModelError):
    """The engine would not compute exactly what the model's makers defined."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(model, reason)
        self.model = model
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot run {self.model}: {self.reason}"


class ModelFilesMissing(ModelError):
    """A model lacks a file, or a weight in its files, that the engine needs."""

    def __init__(self, model: str, missing: str) -> None:
        super().__init__(model, missing)
        self.model = model
        self.missing = missing

    def __str__(self) -> str:
        return f"{self.model} has no {self.missing}"


class EngineNotKnown(ModelError):
    """No engine has the name that was asked for."""

    def __init__(self, engine: str, known: tuple[str, ...]) -> None:
        super().__init__(engine, known)
        self.engine = engine
        self.known = known

    def __str__(self) -> str:
        return f"no engine is called {self.engine!r}; there are {', '.join(self.known)}"


class TokenNotKnown(ModelError):
    """A step holds a token id that the model has no embedding for."""

    def __init__(self, token_id: int, vocab_size: int) -> None:
        super().__init__(token_id, vocab_size)
        self.token_id = token_id
        self.vocab_size = vocab_size

    def __str__(self) -> str:
        return f"token {self.token_id} is not one of the model's {self.vocab_size}"


class PoolNotBound(ModelError):
    """A step was asked for before the engine was given its pool."""

    def __str__(self) -> str:
        return "make_pool comes before forward"
