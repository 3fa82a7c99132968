"""Case C079 with aiohttp's pool: a request on each of four connections every 5.0 s. Arguments: base URL, rounds.

The idle time is that of many servers' default, so a request may meet a connection that is being
closed. Nothing is tried again here: any such error ends the script. Prints how many connections were
opened.
"""

from __future__ import annotations

import asyncio
import sys

import aiohttp

NUM_CONNECTIONS = 4
IDLE_S = 5.0
BODY = {"model": "m", "prompt": "x", "max_tokens": 1}


async def main(base_url: str, num_rounds: int) -> None:
    opened = 0

    async def count(*_: object) -> None:
        nonlocal opened
        opened += 1

    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(count)
    pool = aiohttp.TCPConnector(limit=NUM_CONNECTIONS, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=pool, trace_configs=[trace]) as session:

        async def ask() -> None:
            # POST, which aiohttp does not send again by itself.
            async with session.post(f"{base_url}/completions", json=BODY) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["choices"]

        for number in range(num_rounds):
            if number:
                await asyncio.sleep(IDLE_S)
            await asyncio.gather(*(ask() for _ in range(NUM_CONNECTIONS)))
    print(f"{opened} connections")  # noqa: T201 (what the test reads)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
