"""Any other decoder-only model: transformers' own modules, with our paged attention inside.

Slower than the compact decoder, and as exact: what it cannot run exactly it refuses when it is
loaded. A short text is computed by the modules' own attention and by ours, in chunks through blocks,
and the logits must agree; the masks that the modules ask for are tried over the whole context.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AttentionInterface, AttentionMaskInterface

from pipeline.intake.context_length import exact_context
from workers.kernels.operators import Operators, PagedAttention, StepPlan
from workers.models.attention_survey import MODULE_FAULTS, Survey, SurveyRefused, shortened
from workers.models.config_refusals import read_json, refuse_untold
from workers.models.errors import ModelRefused
from workers.models.model_facts import ModelFacts, token_ids_of
from workers.models.weights import weight_paths

_IMPLEMENTATION = "pointsman_paged"
_NOT_SAID = 2048


class ModulesModel:
    """A model of a directory, before it is known which operators attend."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Read it and try it.

        Raises:
            ModelFilesMissing: the directory lacks files.
            ModelRefused: transformers cannot load it whole, or blocks of keys and values are not
                all that its layers remember.
        """
        self.name = directory.name
        self.module = _load(directory, dtype).to(device).eval()
        if not self.module._can_set_attn_implementation():  # noqa: SLF001  # nothing public tells
            raise ModelRefused(self.name, "its modules take no attention function but their own")
        try:
            self.survey = Survey.of(self.module, _IMPLEMENTATION)
        except SurveyRefused as error:
            raise ModelRefused(self.name, error.reason) from error

    @property
    def facts(self) -> ModelFacts:
        """What the runner must know of it."""
        config = self.module.config.get_text_config()
        generation = self.module.generation_config
        return ModelFacts(
            name=self.name,
            vocab_size=self.module.get_output_embeddings().weight.shape[0],
            context_tokens=exact_context(config.to_dict()) or _NOT_SAID,
            num_layers=len(self.survey.shapes),
            num_kv_heads=self.survey.shapes[0].num_kv_heads,
            head_dim=self.survey.shapes[0].head_dim,
            eos_token_ids=token_ids_of(config.eos_token_id) | token_ids_of(generation.eos_token_id),
        )


class ModulesDecoder:
    """The whole model, without its KV. Interface and rules are those of `Decoder`."""

    def __init__(self, model: ModulesModel, operators: Operators) -> None:
        self._module = model.module
        self._survey = model.survey
        self._operators = operators
        self._no_rope = torch.empty((1, 0), device=operators.device)

    def rope(self, num_positions: int) -> torch.Tensor:
        """The modules rotate by themselves: an empty table."""
        return self._no_rope

    def reserve(self, num_rows: int) -> None:
        """The modules allocate as they go."""

    def bind(self, pool: torch.Tensor) -> list[PagedAttention]:
        """See `Decoder.bind`."""
        return [
            self._operators.attention(shape, pool[:, number, 0], pool[:, number, 1])
            for number, shape in enumerate(self._survey.shapes)
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attentions: list[PagedAttention],
        plan: StepPlan,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        device = self._operators.device
        padded = token_ids.new_zeros(len(plan.positions))
        padded[: len(token_ids)] = token_ids
        for module, attention in zip(self._survey.modules, attentions, strict=True):
            module.pointsman_attention = _LayerStep(attention, plan, self._operators.dtype)
        rows = logit_rows.to(device)
        logits: torch.Tensor = self._module(
            input_ids=padded[None].to(device),
            position_ids=plan.positions[None],
            use_cache=False,
            logits_to_keep=rows,
        ).logits[0]
        if len(logits) != len(rows):  # a model that does not know the option
            logits = logits[rows]
        return logits.float()


class _LayerStep:
    """One layer's attention in one step, as transformers calls it."""

    def __init__(self, attention: PagedAttention, plan: StepPlan, dtype: torch.dtype) -> None:
        self._attention = attention
        self._plan = plan
        self._dtype = dtype

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """(1, T, heads, head_dim) of (1, heads, T, head_dim)."""
        parts = [part[0].transpose(0, 1).float() for part in (query, key, value)]
        qkv = torch.cat(parts, dim=1)
        queries = torch.empty(parts[0].shape, dtype=self._dtype, device=qkv.device)
        out = torch.empty_like(queries)
        self._attention.rotate_and_store(self._plan, qkv, queries)
        self._attention.attend_prefill(self._plan, queries, out)
        self._attention.attend_decode(self._plan, queries, out)
        return out[None].to(query.dtype)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers knows; who attends stands in the module."""
    step = module.pointsman_attention
    return step.attend(query, key, value, module=module, mask=attention_mask, **options), None


def _mask_as_rule(*, mask_function: object, **_: Any) -> object:
    """A mask that is no tensor: the function of places that would fill it. Only the survey asks it."""
    return mask_function


AttentionInterface.register(_IMPLEMENTATION, _paged_attention)
AttentionMaskInterface.register(_IMPLEMENTATION, _mask_as_rule)


def _load(directory: Path, dtype: torch.dtype) -> Any:
    weight_paths(directory)
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            config=_config_of(directory),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in our words
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (*MODULE_FAULTS, OSError, ImportError, SafetensorError) as error:
        raise ModelRefused(directory.name, _in_short(error)) from error
    wrong = sorted({str(name) for kind in info.values() for name in kind})
    if wrong:
        raise ModelRefused(directory.name, f"its weights are not those of its config: {wrong[:3]}")
    return model


def _config_of(directory: Path) -> Any:
    told = read_json(directory / "config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (*MODULE_FAULTS, OSError, StrictDataclassError) as error:
        raise ModelRefused(directory.name, _in_short(error)) from error
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise ModelRefused(directory.name, f"{config.model_type} is no causal language model")
    refuse_untold(directory, told, _fields_known_to(type(config)), kind.__name__)
    tokens = exact_context(config.get_text_config().to_dict())
    if tokens is not None and tokens < (exact_context(told) or tokens):
        reason = f"its angles change after {tokens} tokens, which its config.json does not say"
        raise ModelRefused(directory.name, reason)
    return config


def _fields_known_to(kind: Any) -> set[str]:
    """Fields that a class of configs declares, also under a second name, or makes by itself."""
    names = {*kind.__dataclass_fields__, *kind.attribute_map, *kind.attribute_map.values()}
    with contextlib.suppress(*MODULE_FAULTS, StrictDataclassError):  # it has no defaults
        names |= set(dir(kind()))
    return names


def _in_short(error: Exception) -> str:
    """What transformers says, on one line."""
    return shortened(f"transformers cannot load it ({type(error).__name__}): {error}")
