"""The arrays of one step."""

from __future__ import annotations

from pipeline.protocol.sampling import SamplingParams
from workers.batch import BatchBuilder, ScheduledChunk
from workers.sequence import Sequence
from workers.sequence_run import SequenceRun


def make_run(num_tokens: int, num_computed: int, block_ids: list[int]) -> SequenceRun:
    sequence = Sequence(
        request_id="r",
        attempt=1,
        tokens=[100 + place for place in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1),
        key_root=bytes(32),
        num_computed=num_computed,
        block_ids=block_ids,
    )
    return SequenceRun(sequence, 1)


def test_a_mixed_step_packs_decode_rows_and_chunks_one_after_the_other() -> None:
    builder = BatchBuilder(block_tokens=4, max_tokens=16, max_sequences=4)
    decode = make_run(6, 5, [7, 3])
    chunk = make_run(9, 2, [1, 9, 4])

    batch = builder.build([ScheduledChunk(decode, 1), ScheduledChunk(chunk, 4)])

    assert batch.token_ids.tolist() == [105, 102, 103, 104, 105]
    assert batch.positions.tolist() == [5, 2, 3, 4, 5]
    assert batch.slot_mapping.tolist() == [13, 6, 7, 36, 37]
    assert batch.cu_query_lens.tolist() == [0, 1, 5]
    assert batch.context_lens.tolist() == [6, 6]
    assert batch.block_tables.tolist() == [[7, 3, 0], [1, 9, 4]]
    assert batch.logit_rows.tolist() == [0]
    assert batch.num_prompt_tokens == [6, 9]
    assert batch.histories[0] is decode.sequence.tokens


def test_the_last_chunk_of_a_prompt_asks_for_its_last_row() -> None:
    builder = BatchBuilder(block_tokens=4, max_tokens=16, max_sequences=4)
    batch = builder.build([ScheduledChunk(make_run(9, 4, [1, 9, 4]), 5)])
    assert batch.logit_rows.tolist() == [4]


def test_a_table_that_grows_or_starts_over_is_followed() -> None:
    builder = BatchBuilder(block_tokens=4, max_tokens=64, max_sequences=2)
    run = make_run(60, 0, list(range(20, 22)))
    builder.build([ScheduledChunk(run, 8)])
    run.sequence.block_ids += list(range(22, 35))
    assert builder.build([ScheduledChunk(run, 60)]).block_tables.tolist() == [list(range(20, 35))]
    run.forget_blocks()
    run.sequence.block_ids = [5, 6]
    batch = builder.build([ScheduledChunk(run, 8)])
    assert batch.block_tables.tolist() == [[5, 6]]
    assert batch.slot_mapping.tolist() == [*range(20, 28)]
