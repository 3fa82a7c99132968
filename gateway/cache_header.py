"""The header of a whole answer that tells where the KV of its prompt came from."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi.responses import Response

from gateway.services import Services
from pipeline.errors import StoreUnavailable
from pipeline.intake.build import Generation
from pipeline.protocol.cache_use import CacheUse

CACHE_HEADER = "X-Pointsman-KV"
WAIT_S = 0.1  # an answer that is there waits no longer for what is only told about it


async def tell_cache_use(services: Services, generation: Generation, answer: Response) -> None:
    """Set the header, for the first choice. An answer goes out without it rather than not at all."""
    first = generation.requests[0]
    use: CacheUse | None = None
    with suppress(StoreUnavailable, TimeoutError):
        async with asyncio.timeout(WAIT_S):
            use = await services.client.cache_use(first.request_id)
    if use is not None:
        answer.headers[CACHE_HEADER] = header_value(use, len(first.prompt_tokens))


def header_value(use: CacheUse, num_prompt_tokens: int) -> str:
    """`hbm=0, dram=96, nvme=0, peer=0, computed=4, load=faster`, then those that are known of the rest."""
    num_computed = num_prompt_tokens - use.hbm_tokens - use.num_loaded
    pairs: dict[str, object] = {
        "hbm": use.hbm_tokens,
        "dram": use.dram_tokens,
        "nvme": use.nvme_tokens,
        "peer": use.peer_tokens,
        "computed": num_computed,
        "recomputed": use.recomputed_tokens or None,
        "load": use.load,
        "pull": use.pull,
        "estimated_ms": use.estimated_ms,
        "compute_ms": use.compute_ms,
        "taken_ms": use.taken_ms,
    }
    return ", ".join(f"{name}={value}" for name, value in pairs.items() if value is not None)
