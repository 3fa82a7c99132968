"""Finding out what attention a model of transformers' modules has, and that ours is the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from workers.kernels.operators import AttentionShape

_NUM_TOKENS = 48
_LONGEST_WINDOW = 512  # a longer one is tried by its mask alone
_FIRST_CHUNK = 29
# Of the largest logit: only the order of sums differs, or what rounding to bfloat16 makes of it.
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 4e-2}
_LONGEST_REASON = 240  # characters
# What modules raise for a config that makes no sense to them.
MODULE_FAULTS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_NOT_OURS = {"softcap": "a soft cap", "s_aux": "sinks", "position_bias": "a bias by position"}


def shortened(words: str) -> str:
    """Somebody else's words on one line of bounded length."""
    return " ".join(words.split())[:_LONGEST_REASON]


class SurveyRefused(Exception):
    """The model's attention is not causal attention over blocks of keys and values alone."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Survey:
    """The modules that attend, in the order of their layers, and what each asks for."""

    modules: list[Any]
    shapes: list[AttentionShape]

    @staticmethod
    def of(model: Any, implementation: str) -> Survey:
        """Survey a model, and leave it with the attention function called `implementation`.

        That function must call `attend` of the calling module's attribute `pointsman_attention`.

        Raises:
            SurveyRefused: see there.
        """
        surveyor = _Surveyor(_context_tokens(model))
        try:
            expected, ours = _tried(model, implementation, surveyor)
        except MODULE_FAULTS as fault:
            words = f"its modules fail on a short text ({type(fault).__name__}): {fault}"
            raise SurveyRefused(shortened(words)) from fault
        survey = surveyor.survey()
        error = (ours - expected).abs().max() / expected.abs().max()
        if not error <= _TOLERANCE[model.dtype]:
            raise SurveyRefused(
                f"computed in chunks its logits are off by {100 * error:.2g} % of the largest:"
                " it has more state than keys and values, or attention that is not causal"
            )
        return survey


def _tried(
    model: Any, implementation: str, surveyor: _Surveyor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a short text, by the modules alone, and in two chunks with the surveyor's attention."""
    tokens = _tokens(model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model(input_ids=tokens, use_cache=False).logits.float()
        model.set_attn_implementation(implementation)
        for module in model.modules():
            module.pointsman_attention = surveyor
        parts = []
        for start, end in ((0, _FIRST_CHUNK), (_FIRST_CHUNK, tokens.shape[1])):
            surveyor.begin()
            places = torch.arange(start, end, device=tokens.device)[None]
            given = {"input_ids": tokens[:, start:end], "position_ids": places}
            parts.append(model(**given, use_cache=False).logits.float())
    for module in model.modules():
        del module.pointsman_attention
    return expected, torch.cat(parts, dim=1)


def _context_tokens(model: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", 0) or _NUM_TOKENS)


def _tokens(model: Any) -> torch.Tensor:
    """A text that is longer than a window, if that is short."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    num_tokens = _NUM_TOKENS + (window if window <= _LONGEST_WINDOW else 0)
    generator = torch.Generator().manual_seed(num_tokens)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    return torch.randint(vocab_size, (1, num_tokens), generator=generator).to(model.device)


class _Surveyor:
    """Attends densely in place of the blocks, and notes who asked for what."""

    def __init__(self, context_tokens: int) -> None:
        self._context_tokens = context_tokens
        self._shapes: dict[Any, AttentionShape] = {}
        self._contexts: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: set[Any] = set()

    def begin(self) -> None:
        """A further chunk of the text."""
        self._seen.clear()

    def survey(self) -> Survey:
        """What was noted."""
        shapes = list(self._shapes.values())
        if not shapes:
            raise SurveyRefused("it has no attention that could be paged")
        sizes = {(shape.num_kv_heads, shape.head_dim) for shape in shapes}
        if len(sizes) > 1:
            raise SurveyRefused(f"its layers have keys of different sizes: {sorted(sizes)}")
        return Survey(list(self._shapes), shapes)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """(1, T, heads, head_dim) of (1, heads, T, head_dim)."""
        module = options["module"]
        if module in self._seen:
            raise SurveyRefused("a layer attends twice")
        self._seen.add(module)
        for name, words in _NOT_OURS.items():
            if options.get(name) is not None:
                raise SurveyRefused(f"its attention has {words}")
        if key.shape != value.shape:
            raise SurveyRefused("its keys and values have different sizes")
        scaling = options.get("scaling")
        shape = AttentionShape(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            num_rotated=0,
            window=int(options.get("sliding_window") or 0),
        )
        if self._shapes.setdefault(module, shape) != shape:
            raise SurveyRefused("its attention changes from step to step")
        self._try_mask(options.get("mask"), shape.window)
        return self._dense(module, shape, query, key, value)

    def _try_mask(self, mask: Any, window: int) -> None:
        """A short text does not show what is hidden from tokens further apart; the mask's rule does."""
        if mask is None:
            return
        if not callable(mask):
            raise SurveyRefused("its attention has a mask of its own")
        places = _telling_places(window, self._context_tokens)
        rows, columns, zero = places[:, None], places[None], torch.tensor(0)
        expected = columns <= rows
        if window:
            expected &= columns > rows - window
        if not torch.equal(mask(zero, zero, rows, columns).expand_as(expected), expected):
            raise SurveyRefused(
                f"its attention's mask is not {f'a window of {window} tokens' if window else 'causal'}"
            )

    def _dense(
        self,
        module: Any,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        if module in self._contexts:
            old_key, old_value = self._contexts[module]
            key, value = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
        self._contexts[module] = key, value
        length, count = key.shape[2], query.shape[2]
        places = torch.arange(length, device=key.device)
        rows = torch.arange(length - count, length, device=key.device)[:, None]
        mask = places <= rows
        if shape.window:
            mask &= places > rows - shape.window
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=shape.scale, enable_gqa=True
        )
        return attended.transpose(1, 2)


def _telling_places(window: int, context_tokens: int) -> torch.Tensor:
    """Places of a context between which masks differ: near, at powers of two, at windows, far."""
    near = {*range(_NUM_TOKENS), window - 1, window, window + 1, context_tokens - 1}
    powers = {
        2**power + step for power in range(context_tokens.bit_length()) for step in (-1, 0, 1)
    }
    random = torch.randint(context_tokens, (50,), generator=torch.Generator().manual_seed(0))
    every = near | powers | set(random.tolist())
    return torch.tensor(sorted(place for place in every if 0 <= place < context_tokens))
