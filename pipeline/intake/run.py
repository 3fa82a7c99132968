"""Runs a generation: submits its requests and follows them all at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pipeline.cancellation import end_tasks
from pipeline.client import PipelineClient
from pipeline.errors import PipelineError
from pipeline.intake.build import Generation
from pipeline.intake.errors import refusal_of
from pipeline.intake.response import AnswerShape, ChoiceCollector, ChoiceOutcome
from pipeline.intake.vocabulary import Vocabulary
from pipeline.protocol.failure import Ending, FailureCode
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.stream import PromptScored, RequestUsage, StreamEnded, StreamEvent

_SCORES_LOST = Ending(failure=FailureCode.INTERNAL_ERROR)
MAX_EVENTS_AHEAD = 256  # of a reader that is slower than the model


async def submit_all(client: PipelineClient, generation: Generation) -> None:
    """Queue every request of a generation, or none.

    Raises:
        Overloaded, StoreUnavailable: what was queued before is cancelled again.
    """
    num_submitted = 0
    try:
        for request in generation.requests:
            await client.submit(request)
            num_submitted += 1
    except PipelineError:
        await asyncio.shield(_cancel(client, generation.requests[:num_submitted]))
        raise
    except asyncio.CancelledError:
        # The interrupted one may have been queued too.
        await asyncio.shield(_cancel(client, generation.requests[: num_submitted + 1]))
        raise


async def cancel_all(client: PipelineClient, generation: Generation) -> None:
    """Stop every request of a generation that still runs."""
    await _cancel(client, generation.requests)


async def follow_all(
    client: PipelineClient, generation: Generation
) -> AsyncGenerator[tuple[int, StreamEvent], None]:
    """(choice, event) of all choices as they come; ends when every choice has ended."""
    if len(generation.requests) == 1:
        request = generation.requests[0]
        async for item in follow_indexed(client, request.request_id, 0, request.sampling):
            yield item
        return
    events: asyncio.Queue[tuple[int, StreamEvent | Exception]] = asyncio.Queue(MAX_EVENTS_AHEAD)

    async def forward(index: int, request: Request) -> None:
        try:
            async for item in follow_indexed(client, request.request_id, index, request.sampling):
                await events.put(item)
        except Exception as error:
            await events.put((index, error))
            raise

    tasks = [
        asyncio.create_task(forward(index, request))
        for index, request in enumerate(generation.requests)
    ]
    try:
        num_open = len(tasks)
        while num_open:
            index, event = await events.get()
            if isinstance(event, Exception):
                raise event
            num_open -= isinstance(event, StreamEnded)
            yield index, event
    finally:
        await end_tasks(*tasks)


async def run_whole(
    client: PipelineClient, generation: Generation, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Submit a generation and return its whole answer; cancelled with the caller.

    Raises:
        Overloaded, StoreUnavailable: it was not queued.
        RequestFailed, RequestCancelled: a choice did not end normally.
    """
    await submit_all(client, generation)
    try:
        return await collect(follow_all(client, generation), generation, vocabulary)
    except BaseException:
        await asyncio.shield(cancel_all(client, generation))
        raise


async def collect(
    events: AsyncGenerator[tuple[int, StreamEvent], None],
    generation: Generation,
    vocabulary: Vocabulary,
) -> dict[str, Any]:
    """The whole answer of a generation whose events come from `follow_all`.

    Raises:
        RequestFailed, RequestCancelled: a choice did not end normally.
    """
    shape = AnswerShape(generation, vocabulary)
    return shape.whole(await collect_choices(events, generation, vocabulary))


async def collect_choices(
    events: AsyncGenerator[tuple[int, StreamEvent], None],
    generation: Generation,
    vocabulary: Vocabulary,
) -> list[ChoiceOutcome]:
    """What every choice of a generation came to, well or badly."""
    collectors = [
        ChoiceCollector(request.sampling, vocabulary, generation.echo_of(index))
        for index, request in enumerate(generation.requests)
    ]
    async with aclosing(events):
        async for index, event in events:
            collectors[index].feed(event)
    return [collector.outcome for collector in collectors]


async def follow_indexed(
    client: PipelineClient, request_id: str, index: int, sampling: SamplingParams
) -> AsyncGenerator[tuple[int, StreamEvent], None]:
    """All events of one request as those of choice `index`."""
    is_scored = not sampling.scores_prompt
    async for event in client.follow(request_id, num_logprobs=sampling.num_logprobs):
        if not is_scored:
            is_scored = True
            scores = await client.prompt_scores(request_id, sampling.num_logprobs or 0)
            if scores is not None:
                yield index, PromptScored(scores)
            elif not _has_failed(event):
                # Never an answer that leaves out in silence what was asked for.
                yield index, StreamEnded(_SCORES_LOST, RequestUsage(0, 0, 0))
                return
        yield index, event


def _has_failed(event: StreamEvent) -> bool:
    """True for an ending that clients see as an error."""
    return isinstance(event, StreamEnded) and refusal_of(event.ending) is not None


async def _cancel(client: PipelineClient, requests: tuple[Request, ...]) -> None:
    await client.abandon([request.request_id for request in requests])
