"""Cases C001, C002, C005, C008, C009 on the test vocabulary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.intake.detokenizer import Detokenizer, StopMatcher, TextRules
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.script_book import BASE_VOCAB_SIZE, EOS_ID

REPLACEMENT = "\ufffd"


def spoken(pieces: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str]:
    """What each piece lets go as one token, and what comes at the end."""
    vocabulary = ByteVocabulary(pieces)
    detokenizer = Detokenizer(vocabulary, TextRules(tuple(stop)))
    chunks = [detokenizer.feed(BASE_VOCAB_SIZE + rank) for rank in range(len(pieces))]
    return chunks, detokenizer.finish()


def test_a_two_byte_character_over_two_tokens_comes_whole() -> None:
    chunks, rest = spoken([b"caf", b"\xc3", b"\xa9", b"!"])
    assert chunks == ["caf", "", "é", "!"]
    assert rest == ""


def test_a_family_emoji_comes_in_whole_code_points() -> None:
    family = "👩‍👩‍👧"
    chunks, rest = spoken([*(bytes([byte]) for byte in family.encode()), b" ok"])
    assert "".join(chunks) + rest == family + " ok"
    assert all(chunk.encode("utf-8") is not None for chunk in chunks)
    assert not any(REPLACEMENT in chunk for chunk in chunks)


def test_a_bad_byte_is_one_replacement_and_holds_nothing_back() -> None:
    chunks, rest = spoken([b"ok ", b"\xff", b" more"])
    assert chunks == ["ok ", REPLACEMENT, " more"]
    assert rest == ""


def test_a_character_that_turns_out_bad_is_released_with_the_token_that_proves_it() -> None:
    chunks, rest = spoken([b"\xf0\x9f", b"x", b"y"])
    assert chunks == ["", REPLACEMENT + "x", "y"]
    assert rest == ""


def test_an_incomplete_character_is_replaced_only_at_the_end() -> None:
    chunks, rest = spoken([b"a", b"\xe2\x82"])
    assert chunks == ["a", ""]
    assert rest == REPLACEMENT


def test_a_stop_string_over_three_tokens_never_leaks() -> None:
    pieces = [b"Answer 42", b"\nOb", b"serv", b"ation: x"]
    chunks, rest = spoken(pieces, ("\nObservation",))
    assert chunks == ["Answer 42", "", "", ""]
    assert rest == ""


def test_a_failed_stop_candidate_is_released_by_the_token_that_fails_it() -> None:
    chunks, rest = spoken([b"a", b"EN", b"D", b"IVY"], ("ENDING",))
    assert chunks == ["a", "", "", "ENDIVY"]
    assert rest == ""


def test_a_stop_candidate_is_released_at_the_end_of_the_answer() -> None:
    chunks, rest = spoken([b"x", b"EN"], ("ENDING",))
    assert chunks == ["x", ""]
    assert rest == "EN"


def test_the_earliest_of_several_stop_strings_cuts() -> None:
    chunks, rest = spoken([b"one two three"], ("three", "two"))
    assert chunks == ["one "]
    assert rest == ""


def test_a_candidate_that_contains_a_later_candidate_keeps_only_that() -> None:
    chunks, rest = spoken([b"aa", b"a", b"b"], ("aab",))
    assert chunks == ["", "a", ""]
    assert rest == ""


def test_control_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(ByteVocabulary())
    assert detokenizer.feed(EOS_ID) == ""
    assert detokenizer.feed(ord("a")) == "a"


def test_the_stop_matcher_is_true_from_the_completing_token_on() -> None:
    pieces = [b"Answer 42", b"\nOb", b"serv", b"ation: x"]
    matcher = StopMatcher(ByteVocabulary(pieces), TextRules(("\nObservation",)))
    ids = range(BASE_VOCAB_SIZE, BASE_VOCAB_SIZE + 4)
    assert [matcher.feed(token_id) for token_id in ids] == [False, False, False, True]
    assert matcher.feed(ord("x"))


def test_a_stop_string_with_a_cut_character_is_found() -> None:
    pieces = [b"ok", "é".encode()[:1], "é".encode()[1:], b"!"]
    matcher = StopMatcher(ByteVocabulary(pieces), TextRules(("é!",)))
    ids = range(BASE_VOCAB_SIZE, BASE_VOCAB_SIZE + 4)
    assert [matcher.feed(token_id) for token_id in ids] == [False, False, False, True]


@given(st.lists(st.binary(min_size=1, max_size=4), max_size=20))
def test_chunks_join_to_the_text_of_all_bytes_at_once(pieces: list[bytes]) -> None:
    chunks, rest = spoken(pieces)
    assert "".join(chunks) + rest == b"".join(pieces).decode("utf-8", "replace")


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_text_from_the_first_complete_stop_string_on_comes_out(
    pieces: list[str], stop: list[str]
) -> None:
    chunks, rest = spoken([piece.encode() for piece in pieces], tuple(stop))
    whole = "".join(pieces)
    out = "".join(chunks) + rest
    assert whole.startswith(out)
    assert not any(text in out for text in stop)
    if not any(text in whole for text in stop):
        assert out == whole


def spoken_by(rules: TextRules, *pieces: bytes) -> str:
    vocabulary = ByteVocabulary(pieces)
    detokenizer = Detokenizer(vocabulary, rules)
    text = "".join([detokenizer.feed(BASE_VOCAB_SIZE + rank) for rank in range(len(pieces))])
    return text + detokenizer.finish()


def test_a_stop_string_that_is_wanted_ends_the_text() -> None:
    assert spoken_by(TextRules(("END",), shows_stop=True), b"aE", b"NDb", b"c") == "aEND"
    assert spoken_by(TextRules(("bcd", "bc"), shows_stop=True), b"abcd") == "abc"


def test_text_of_the_first_tokens_stops_nothing() -> None:
    rules = TextRules(("b",), min_tokens=2)
    assert spoken_by(rules, b"ab", b"ab", b"ab", b"c") == "ababa"
    matcher = StopMatcher(ByteVocabulary(), rules)
    assert [matcher.feed(token) for token in b"bbab"] == [False, False, False, True]


def test_a_stop_string_across_the_least_number_of_tokens_is_found() -> None:
    assert spoken_by(TextRules(("xyz",), min_tokens=2), b"xyz", b" x", b"yz", b"c") == "xyz "


def test_control_tokens_have_a_text_only_where_it_is_wanted() -> None:
    vocabulary = ByteVocabulary()
    assert Detokenizer(vocabulary).feed(EOS_ID) == ""
    assert Detokenizer(vocabulary, TextRules(shows_special=True)).feed(EOS_ID) == "<eos>"
