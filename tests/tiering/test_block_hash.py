"""Block keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.block_hash import BlockHasher, KeyChain, namespace_root, tail_key

FIELDS: dict[str, str | int | bytes] = {
    "weights": b"\x01" * 32,
    "dtype": "float32",
    "block_tokens": 16,
    "tenant": "a",
}
ROOT = namespace_root(FIELDS)
tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)
values = st.one_of(st.text(max_size=6), st.integers(-10, 10), st.binary(max_size=6))
field_maps = st.dictionaries(st.text(max_size=4), values, max_size=4)


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "b"},
        {"dtype": "bfloat16"},
        {"block_tokens": 32},
        {"weights": b"\x02" * 32},
        {"weights": "\x01" * 32},
        {"adapter": ""},
    ],
)
def test_every_change_of_the_namespace_gives_other_keys(
    change: dict[str, str | int | bytes],
) -> None:
    other = BlockHasher(namespace_root(FIELDS | change)).keys(range(64), 16)
    mine = BlockHasher(ROOT).keys(range(64), 16)
    assert not set(other) & set(mine)


@given(field_maps, field_maps)
def test_two_namespaces_share_a_root_only_if_they_are_equal(
    one: dict[str, str | int | bytes], other: dict[str, str | int | bytes]
) -> None:
    assert (namespace_root(one) == namespace_root(other)) == (one == other)


def test_bytes_cannot_move_from_a_field_into_its_neighbour() -> None:
    assert namespace_root({"a": "xb", "c": ""}) != namespace_root({"a": "x", "bc": ""})
    assert namespace_root({"lora": "X"}) != namespace_root({"salt": "X"})
    assert namespace_root({"n": 1}) != namespace_root({"n": "1"})


def test_the_order_of_fields_does_not_matter() -> None:
    assert namespace_root(dict(reversed(FIELDS.items()))) == ROOT


@given(tokens_lists, st.integers(1, 20))
def test_a_chain_extended_block_by_block_equals_the_keys_at_once(
    tokens: list[int], block_tokens: int
) -> None:
    chain = KeyChain(ROOT)
    keys = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        keys.append(chain.extend(tokens[start : start + block_tokens]))
        chain = KeyChain(chain.state)
    assert keys == BlockHasher(ROOT).keys(tokens, block_tokens)


@given(tokens_lists, st.integers(0, 199))
def test_a_changed_token_changes_its_block_and_all_behind_it(tokens: list[int], at: int) -> None:
    if at >= len(tokens):
        return
    changed = [*tokens[:at], (tokens[at] + 1) % 2**32, *tokens[at + 1 :]]
    mine, other = BlockHasher(ROOT).keys(tokens, 4), BlockHasher(ROOT).keys(changed, 4)
    assert mine[: at // 4] == other[: at // 4]
    assert not set(mine[at // 4 :]) & set(other[at // 4 :])


def test_only_full_blocks_have_keys_and_a_key_is_16_bytes() -> None:
    assert [len(BlockHasher(ROOT).keys(range(n), 16)) for n in (0, 15, 16, 17, 32)] == [
        *(0, 0, 1, 1, 2)
    ]
    assert {len(key) for key in BlockHasher(ROOT).keys(range(32), 16)} == {16}


def test_tail_keys_differ_by_request_attempt_length_and_tenant() -> None:
    other_root = namespace_root(FIELDS | {"tenant": "b"})
    keys = {
        tail_key(ROOT, "r1", 1, 20),
        tail_key(ROOT, "r1", 2, 20),
        tail_key(ROOT, "r1", 1, 21),
        tail_key(ROOT, "r2", 1, 20),
        tail_key(other_root, "r1", 1, 20),
    }
    assert len(keys) == 5
    assert {len(key) for key in keys} == {16}


@pytest.mark.parametrize("tokens", [[], [-1], [2**32]])
def test_what_is_no_block_is_refused(tokens: list[int]) -> None:
    with pytest.raises(ValueError, match="token"):
        KeyChain(ROOT).extend(tokens)


def test_a_chain_needs_a_whole_root() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        KeyChain(ROOT[:16])


def test_a_bool_in_the_namespace_is_refused() -> None:
    with pytest.raises(TypeError, match="bool"):
        namespace_root({"flag": True})
