"""Blocks packed into int8 and fp8."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from tiering.block_codec import BlockCodec, Compression, codec_of
from tiering.block_layout import BlockLayout, KvDtype

Numbers = npt.NDArray[np.float32]
LAYERS, TOKENS, HEADS, DIM = 3, 16, 2, 24
PACKED = [Compression.INT8, Compression.FP8]
DTYPES: list[KvDtype] = ["float32", "bfloat16", "float16"]
# Half of the last place that a number of this type has, relative to it.
HALF_PLACE: dict[KvDtype, float] = {"float32": 2**-24, "bfloat16": 2**-8, "float16": 2**-11}
SMALLEST_HALF = 2**-25  # of float16; the others reach far below the numbers here


def layout_of(dtype: KvDtype) -> BlockLayout:
    return BlockLayout(LAYERS, TOKENS, HEADS, DIM, dtype)


def to_bytes(numbers: Numbers, dtype: KvDtype) -> npt.NDArray[np.uint8]:
    if dtype == "bfloat16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
    return np.ascontiguousarray(numbers, dtype=dtype).reshape(-1).view(np.uint8)


def to_numbers(data: npt.NDArray[np.uint8], dtype: KvDtype) -> Numbers:
    shape = (LAYERS, 2, TOKENS, HEADS, DIM)
    if dtype == "bfloat16":
        wide = data.view(np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    return data.view(dtype).astype(np.float32).reshape(shape)


def random_block(dtype: KvDtype, seed: int = 1) -> npt.NDArray[np.uint8]:
    """Heads of very different size."""
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=(LAYERS, 2, TOKENS, HEADS, DIM))
    numbers *= 10.0 ** rng.integers(-3, 4, size=(LAYERS, 2, 1, HEADS, 1))
    return to_bytes(numbers.astype(np.float32), dtype)


def there_and_back(codec: BlockCodec, block: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    packed = np.empty(codec.packed_bytes, dtype=np.uint8)
    assert codec.pack(block, packed)
    back = np.empty_like(block)
    codec.unpack(packed, back)
    return back


def e4m3_values() -> Numbers:
    """All numbers of the format by its definition, ascending; the two codes of no number left out."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        values += [size, -size]
    return np.unique(np.array(values, dtype=np.float32))


def tops_of(numbers: Numbers) -> Numbers:
    tops: Numbers = np.abs(numbers).max(axis=(2, 4), keepdims=True)
    return tops


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_off_by_half_a_step_of_its_own_head_at_most(dtype: KvDtype) -> None:
    block = random_block(dtype)
    numbers = to_numbers(block, dtype)
    back = to_numbers(there_and_back(BlockCodec(layout_of(dtype), Compression.INT8), block), dtype)
    allowed = tops_of(numbers) * (0.5 / 127 + HALF_PLACE[dtype] + 1e-6)
    assert (np.abs(back - numbers) <= allowed + SMALLEST_HALF).all()
    assert (back != numbers).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_takes_the_nearest_number_of_the_format(dtype: KvDtype) -> None:
    block = random_block(dtype)
    numbers = to_numbers(block, dtype)
    back = to_numbers(there_and_back(BlockCodec(layout_of(dtype), Compression.FP8), block), dtype)
    scales = tops_of(numbers) / 448
    distances = np.abs((numbers / scales)[..., None] - e4m3_values())
    allowed = scales * distances.min(axis=-1) + np.abs(numbers) * (HALF_PLACE[dtype] + 1e-6)
    assert (np.abs(back - numbers) <= allowed + scales * 1e-6 + SMALLEST_HALF).all()


def test_every_code_of_fp8_stands_for_the_number_of_the_format() -> None:
    values = e4m3_values()
    layout = BlockLayout(1, 1, 1, len(values), "float32")
    block = np.concatenate([values, values]).view(np.uint8)  # as keys and as values
    back = there_and_back(BlockCodec(layout, Compression.FP8), block)
    assert (back.view(np.float32).reshape(2, -1) == values).all()


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_of_zeros_and_one_of_the_largest_numbers_come_back(
    dtype: KvDtype, compression: Compression
) -> None:
    numbers = np.zeros((LAYERS, 2, TOKENS, HEADS, DIM), dtype=np.float32)
    numbers[:, :, :, 1] = 60_000.0
    numbers[0, 0, 0, 1, 0] = -60_000.0
    block = to_bytes(numbers, dtype)
    back = there_and_back(BlockCodec(layout_of(dtype), compression), block)
    expected = to_numbers(block, dtype)
    assert np.allclose(to_numbers(back, dtype), expected, rtol=2 * HALF_PLACE[dtype], atol=0)


@pytest.mark.parametrize("compression", PACKED)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_block_with_no_number_in_it_is_not_packed(bad: float, compression: Compression) -> None:
    numbers = np.ones((LAYERS, 2, TOKENS, HEADS, DIM), dtype=np.float32)
    numbers[2, 1, 15, 1, 23] = bad
    codec = BlockCodec(layout_of("float32"), compression)
    into = np.empty(codec.packed_bytes, dtype=np.uint8)
    assert not codec.pack(to_bytes(numbers, "float32"), into)


@pytest.mark.parametrize("compression", PACKED)
def test_a_packed_block_has_half_the_bytes_of_16_bit_numbers(compression: Compression) -> None:
    layout = BlockLayout(30, 16, 3, 64, "bfloat16")
    assert BlockCodec(layout, compression).packed_bytes <= 0.51 * layout.block_bytes


@pytest.mark.parametrize("compression", PACKED)
def test_threads_that_pack_at_once_get_what_one_alone_gets(compression: Compression) -> None:
    codec = BlockCodec(layout_of("bfloat16"), compression)
    blocks = [random_block("bfloat16", seed) for seed in range(8)]
    alone = [there_and_back(codec, block).tobytes() for block in blocks]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            together = threads.map(lambda block: there_and_back(codec, block).tobytes(), blocks)
            assert list(together) == alone


def test_what_has_one_byte_a_number_or_no_known_layout_is_left_as_it_is() -> None:
    assert codec_of(layout_of("uint8"), Compression.INT8) is None
    assert codec_of(None, Compression.INT8) is None
    assert codec_of(layout_of("float32"), Compression.NONE) is None
    with pytest.raises(ValueError, match="uint8"):
        BlockCodec(layout_of("uint8"), Compression.FP8)
