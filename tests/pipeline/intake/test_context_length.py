"""How long a context is, as the many forms of config.json say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tokenizers import Tokenizer
from tokenizers.models import BPE

from pipeline.intake.context_length import exact_context
from pipeline.intake.hf_vocabulary import ModelFacts

LONG = {"rope_type": "longrope", "long_factor": [4.0], "short_factor": [1.0]}
ORIGINAL = {"original_max_position_embeddings": 4096}
FULL = {"max_position_embeddings": 131_072}


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, None),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": None, "max_seq_len": 2048}, 2048),
        (FULL | {"rope_scaling": LONG} | ORIGINAL, 4096),
        (FULL | {"rope_scaling": {"type": "su"}} | ORIGINAL, 4096),
        (FULL | {"rope_parameters": LONG | ORIGINAL}, 4096),
        (FULL | {"rope_parameters": {"full_attention": LONG | ORIGINAL}}, 4096),
        (FULL | {"rope_parameters": LONG}, 131_072),  # nothing tells where the other set begins
        (ORIGINAL | {"max_position_embeddings": 2048, "rope_scaling": LONG}, 2048),
        (FULL | ORIGINAL | {"rope_parameters": {"rope_type": "yarn", "factor": 32.0}}, 131_072),
        (FULL | ORIGINAL | {"rope_scaling": None}, 131_072),
    ],
)
def test_a_config_names_its_context(config: dict[str, Any], tokens: int | None) -> None:
    assert exact_context(config) == tokens


def test_an_operator_is_told_that_a_model_has_its_original_context_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FULL | ORIGINAL | {"rope_scaling": LONG}))

    with capture_logs() as lines:
        facts = ModelFacts.read(tmp_path, Tokenizer(BPE()))

    assert facts.max_context == 4096
    assert [(line["event"], line["told"], line["tokens"]) for line in lines] == [
        ("original_context_only", 131_072, 4096)
    ]
