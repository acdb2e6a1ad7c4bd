"""Constraints: what they let through, what is refused before it costs anything, and where a continuation stands."""

from __future__ import annotations

import json
import random
import re
import threading

import llguidance
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.text.grammar import MAX_SOURCE_CHARS, Grammars, Matcher
from models.text.tokenizer import Tokenizer
from router.base.errors import InvalidRequest, RequestFailed
from router.values.constraint import Constraint, ConstraintKind
from tests.support import tiny_tokenizer

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def of_schema(schema: object, *, strict: bool = True) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema), strict=strict)


def of_regex(pattern: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, pattern, param="structured_outputs.regex")


TOKENIZER = Tokenizer(tiny_tokenizer.backend(), eos_ids=[EOS], bos_id=None, adds_bos=False)
GRAMMARS = Grammars(lambda: TOKENIZER)


def allowed_by(matcher: Matcher, vocab_size: int = TOKENIZER.vocab_size) -> npt.NDArray[np.intp]:
    return np.flatnonzero(np.unpackbits(matcher.mask(vocab_size), bitorder="little"))


def say(matcher: Matcher, seed: int, most: int = 400) -> str:
    """Let a model without any sense speak: whatever is allowed, ends sooner than anything else."""
    draw, ids = random.Random(seed), []
    while not matcher.complete and len(ids) < most:
        allowed = allowed_by(matcher)
        token = EOS if EOS in allowed and draw.random() < 0.3 else int(draw.choice(list(allowed)))
        matcher.advance(token)
        ids.append(token)
    return TOKENIZER.decode(ids)


def spell(matcher: Matcher, letter: str, times: int) -> None:
    for _ in range(times):
        matcher.mask(TOKENIZER.vocab_size)
        matcher.advance(TOKENIZER.encode(letter)[0])


@given(seed=st.integers(0, 10_000))
def test_whatever_is_said_under_a_schema_matches_it(seed: int) -> None:
    said = json.loads(say(GRAMMARS.matcher(of_schema(SCHEMA)), seed))
    assert set(said) == {"name", "ages"}
    assert len(said["name"]) <= 6
    assert all(isinstance(age, int) for age in said["ages"])


@given(seed=st.integers(0, 10_000), cut=st.integers(0, 60))
def test_a_continuation_goes_on_where_the_text_ends_whatever_its_tokens_were(seed: int, cut: int) -> None:
    """The text is cut anywhere, inside a token too: what both said together is one answer."""
    said = say(GRAMMARS.matcher(of_schema(SCHEMA)), seed)[:cut]
    whole = said + say(GRAMMARS.matcher(of_schema(SCHEMA), said), seed + 1)
    assert set(json.loads(whole)) == {"name", "ages"}


@pytest.mark.parametrize("pattern", [r"[a-f]{3}-\d{2}", r"(yes|no)!?", r"größe\s🙂+", r"\d{4}-(0[1-9]|1[0-2])"])
def test_whatever_is_said_under_a_regular_expression_matches_all_of_it(pattern: str) -> None:
    for seed in range(20):
        assert re.fullmatch(pattern, say(GRAMMARS.matcher(of_regex(pattern)), seed))


def test_choices_and_grammars_of_both_notations() -> None:
    choice = Constraint(ConstraintKind.CHOICE, json.dumps(["the cat", 'a "dog"\n', "größe"]))
    assert {say(GRAMMARS.matcher(choice), seed) for seed in range(40)} == {"the cat", 'a "dog"\n', "größe"}
    lark = Constraint(ConstraintKind.LARK, 'start: "a" "b"+ "!"\n')
    gbnf = Constraint(ConstraintKind.GBNF, 'root ::= "a" "b"+ "!"\n')
    for grammar in (lark, gbnf):
        assert re.fullmatch("ab+!", say(GRAMMARS.matcher(grammar), 1))


def test_a_padded_vocabulary_has_no_token_in_its_padding() -> None:
    matcher = GRAMMARS.matcher(of_regex(".*"))
    assert matcher.mask(TOKENIZER.vocab_size + 50).shape == (-(-(TOKENIZER.vocab_size + 50) // 8),)
    assert allowed_by(matcher, TOKENIZER.vocab_size + 50).max() < TOKENIZER.vocab_size
    for logits in range(5, TOKENIZER.vocab_size, 37):
        assert matcher.mask(logits).shape == (-(-logits // 8),)
        assert allowed_by(matcher, logits).max() < logits


def test_indented_json_may_be_continued_and_white_space_has_an_end() -> None:
    matcher = GRAMMARS.matcher(of_schema(SCHEMA), '{\n        "name": "a",\n')
    assert json.loads('{\n        "name": "a",\n' + say(matcher, 3))
    with pytest.raises(InvalidRequest, match="does not match"):
        GRAMMARS.matcher(of_schema(SCHEMA), '{"name":' + 100 * " ")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "said",
    [
        '{\n\n\t  "name" :"a",',
        '{"name": "a", "ages": [123456789012345678901234567890',
        '{"name": "a", "ages": [1], "more": ',
    ],
)
def test_an_answer_that_another_server_began_goes_on_as_it_writes(said: str, strict: bool) -> None:
    schema = {key: value for key, value in SCHEMA.items() if key != "additionalProperties"}
    constraint = of_schema(schema, strict=strict)
    assert not GRAMMARS.matcher(constraint).advance_text(said), "nothing that a model is let say here"
    assert allowed_by(GRAMMARS.matcher(constraint, said)).size
    with pytest.raises(InvalidRequest, match="does not match"):
        GRAMMARS.matcher(constraint, '{"name": 1')


HOSTILE = {
    "deep": of_schema(json.loads('{"items":' * 70 + "{}" + "}" * 70)),
    "large": Constraint(
        ConstraintKind.JSON_SCHEMA, '{"x":"' + "a" * MAX_SOURCE_CHARS[ConstraintKind.JSON_SCHEMA] + '"}'
    ),
    "no JSON": Constraint(ConstraintKind.JSON_SCHEMA, "{"),
    "no schema": of_schema([1]),
    "nothing fits": of_schema({"enum": []}),
    "itself": of_schema({"$ref": "#"}),
    "far away": of_schema({"$ref": "http://example.com/schema.json"}),
    "not enforced": of_schema({"type": "array", "uniqueItems": True}),
    "combinations": of_schema(
        {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(12)]}
    ),
    "stars": of_regex("(a|aa)*" * 500),
    "open": of_regex("[a-z"),
    "looks around": of_regex("(?=a)b"),
    "refers back": of_regex(r"(a)\1"),
    "brackets": of_regex("(" * 500 + "a" + ")" * 500),
    "long": of_regex("a" * 5000),
    "no rule": Constraint(ConstraintKind.LARK, "start: nothing\n"),
    "endless": Constraint(ConstraintKind.LARK, "start: start\n"),
    "no GBNF": Constraint(ConstraintKind.GBNF, "root ::= ((\n"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_enforced_is_refused_by_name_and_in_no_time(name: str) -> None:
    constraint = HOSTILE[name]
    with pytest.raises(InvalidRequest, match="cannot be enforced") as refused:
        GRAMMARS.matcher(constraint)
    assert refused.value.param == constraint.param
    assert constraint.param in refused.value.message
    assert len(refused.value.message) < 500


@pytest.mark.parametrize("constraint", [of_regex(r"[^\s\S]"), HOSTILE["itself"]])
def test_that_nothing_matches_is_said_in_words(constraint: Constraint) -> None:
    with pytest.raises(InvalidRequest, match="no answer of this model matches it"):
        GRAMMARS.matcher(constraint)


def test_a_schema_that_is_not_strict_leaves_out_what_cannot_be_enforced() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    assert isinstance(json.loads(say(GRAMMARS.matcher(of_schema(schema, strict=False)), 1)), list)


def test_large_constraints_do_not_keep_small_ones_waiting() -> None:
    grammars = Grammars(lambda: TOKENIZER)
    grammars.matcher(of_regex("a"))
    wide = [
        of_schema({"type": "object", "properties": {f"p{i}_{n}": {"type": "string"} for i in range(900)}})
        for n in range(8)
    ]
    waiting = [grammars.begin(one) for one in wide]
    grammars.begin(of_regex("b+")).result(timeout=60)
    assert not waiting[-1].done()
    for one in waiting:
        one.cancel()


def test_large_constraints_of_one_caller_do_not_keep_those_of_another_waiting() -> None:
    grammars = Grammars(lambda: TOKENIZER)

    def wide(name: str) -> Constraint:
        return of_schema({"type": "object", "properties": {f"{name}{i}": {"type": "string"} for i in range(900)}})

    waiting = [grammars.begin(wide(f"p{n}_"), caller="busy") for n in range(8)]
    grammars.begin(wide("q"), caller="other").result(timeout=60)
    assert not waiting[-1].done()
    for one in waiting:
        one.cancel()


def test_what_is_kept_is_bounded_and_what_failed_is_not_kept() -> None:
    grammars = Grammars(lambda: TOKENIZER)
    for number in range(100):
        grammars.matcher(of_regex(f"a{{{number + 1}}}"))
    assert len(grammars._compiled) == 64
    endless = of_regex(r"(\w+\s?){1,1000}")
    matcher = grammars.matcher(endless)
    with pytest.raises(RequestFailed, match="cannot be followed any further"):
        spell(matcher, "a", 10_000)
    assert endless not in grammars._compiled


FORCED = Constraint(ConstraintKind.LARK, 'start: "hello world" /[a-z ]{0,9}/ "the end"')
ENDS = Constraint(ConstraintKind.REGEX, r"(the cat |[0-9]{1,3}|é+)*")


@given(st.sampled_from([of_schema(SCHEMA), FORCED, ENDS, of_regex(r"[a-f]{3,20}x")]), st.integers(0, 2**20))
def test_asking_about_a_token_says_what_the_mask_says(constraint: Constraint, seed: int) -> None:
    matcher, draw = GRAMMARS.matcher(constraint), random.Random(seed)
    for _ in range(12):
        asked = [token for token in range(TOKENIZER.vocab_size + 3) if matcher.allows(token)]
        assert asked == allowed_by(matcher, TOKENIZER.vocab_size + 3).tolist()
        matcher.advance(draw.choice(asked))
        if matcher.complete:
            break
    assert not matcher.failure


def test_what_is_decided_for_many_tokens_at_once_is_what_each_of_them_would_get() -> None:
    class Unsliced(Tokenizer):
        def for_grammars(self) -> llguidance.LLTokenizer:
            return super().for_grammars().with_slices([])

    plain = Grammars(lambda: Unsliced(tiny_tokenizer.backend(), eos_ids=[EOS], bos_id=None, adds_bos=False))
    for pattern in (
        r"([A-Z][a-z]{1,9}( [a-z]{2,12}){2,8}[.?!] ){20}",
        r"[a-z]{3,30}x",
        r"( the| cat|s){9}",
        r"[a-c ]{40}",
    ):
        sliced, whole, draw = GRAMMARS.matcher(of_regex(pattern)), plain.matcher(of_regex(pattern)), random.Random(1)
        for _ in range(20):
            allowed = allowed_by(sliced).tolist()
            assert allowed == allowed_by(whole).tolist()
            token = draw.choice(allowed)
            for matcher in (sliced, whole):
                matcher.advance(token)


def test_the_vocabulary_is_that_which_llguidance_reads_from_the_tokenizers_own_file() -> None:
    """Given as tokens, it is ready sooner and makes no second tokenizer of the file, which is read here to compare."""
    slices = [*llguidance.LLTokenizer.general_slices()]
    file = tiny_tokenizer.backend().to_str()
    read = llguidance.LLTokenizer(file, n_vocab=TOKENIZER.vocab_size, eos_token=[EOS], slices=slices)
    given = TOKENIZER.for_grammars()
    assert (given.vocab_size, given.eos_tokens) == (read.vocab_size, [EOS])
    for token in range(TOKENIZER.vocab_size):
        assert given.decode_bytes([token]) == read.decode_bytes([token])
        assert given.is_special_token(token) == read.is_special_token(token)
    for text in ("the cat", '{"a": [1, 2]}\n', "h\u00e9 \U0001f600", TOKENIZER.token_of(EOS) or "", ""):
        assert given.tokenize_str(text) == read.tokenize_str(text)
        assert given.tokenize_str(text, parse_special=True) == read.tokenize_str(text, parse_special=True)


def test_a_vocabulary_without_an_end_has_none() -> None:
    """Read from the file, id 0 was taken for one: answers could end in its text."""
    endless = Tokenizer(tiny_tokenizer.backend(), eos_ids=[], bos_id=None, adds_bos=False)
    assert endless.for_grammars().eos_tokens == [endless.vocab_size]
    matcher = Grammars(lambda: endless).matcher(of_regex("(ab)*"))
    assert 0 not in allowed_by(matcher, endless.vocab_size).tolist()


def test_several_threads_may_ask_at_once() -> None:
    grammars, failures = Grammars(lambda: TOKENIZER), []

    def ask(seed: int) -> None:
        for number in range(5):
            said = say(grammars.begin(of_regex(f"[a-z]{{{number + 1}}}")).result(), seed)
            if len(said) != number + 1:
                failures.append(said)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize(
    ("indent", "separators"), [(None, None), (None, (",", ":")), (2, None), ("\t", None), (8, None)]
)
@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_json_may_be_written_as_people_do(
    indent: int | str | None, separators: tuple[str, str] | None, line_break: str
) -> None:
    text = json.dumps({"name": "Ada", "ages": [1, 2]}, indent=indent, separators=separators)
    matcher = GRAMMARS.matcher(of_schema(SCHEMA), text.replace("\n", line_break))
    assert matcher.complete or EOS in allowed_by(matcher)


@pytest.mark.parametrize("space", ["  ", "\n\n", " \n", "\t", "\n \t", "\n\t ", "\n" + " " * 65])
def test_there_is_no_room_for_space_that_says_nothing(space: str) -> None:
    assert not GRAMMARS.matcher(of_schema(SCHEMA)).advance_text(f'{{{space}"name"')
