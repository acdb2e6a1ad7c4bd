"""OpenAI requests decode strictly, and every error names the field."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import InvalidRequest
from router.values.prompt import ChatPrompt, Message, TextPrompt, TokenPrompt
from router.values.request import ApiRequest
from router.values.sampling import SamplingParams
from router.wire.openai.chat import decode_chat
from router.wire.openai.completion import decode_completion
from router.wire.openai.responses import decode_responses

MOST_TOKENS = 1_000_000  # more than any vocabulary has
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields) -> ApiRequest:
    return decode_chat(orjson.dumps({"model": "m", "messages": HELLO, **fields}))


def completion(**fields) -> ApiRequest:
    return decode_completion(orjson.dumps({"model": "m", "prompt": "hello", **fields}))


def response(**fields) -> ApiRequest:
    return decode_responses(orjson.dumps({"model": "m", "input": "hello", **fields}))[0]


def test_defaults_are_openais() -> None:
    call = chat()
    assert call.prompt == ChatPrompt((Message("user", "hello"),))
    assert call.sampling == SamplingParams(max_tokens=None, temperature=1.0, top_p=1.0)
    assert (call.stream, call.include_usage, call.continuation, call.priority) == (False, False, "", None)
    assert completion().sampling.max_tokens == 16


def test_every_parameter_is_taken() -> None:
    call = chat(
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        max_completion_tokens=7,
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=-3,
        stop=["a", "b"],
        presence_penalty=1,
        frequency_penalty=-2,
        repetition_penalty=1.2,
        ignore_eos=True,
        min_p=0.1,
        min_tokens=3,
        stop_token_ids=[5, 6],
        logit_bias={"7": -100, "8": 1.5},
        allowed_token_ids=[7, 8],
        user="u",
        service_tier="auto",
        priority=-4,
        metadata={"a": "b"},
        store=False,
        n=1,
        logprobs=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        bad_words=[],
        modalities=["text"],
    )
    assert call.sampling == SamplingParams(
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        seed=-3,
        stop=("a", "b"),
        presence_penalty=1.0,
        frequency_penalty=-2.0,
        repetition_penalty=1.2,
        ignore_eos=True,
        min_p=0.1,
        min_tokens=3,
        stop_token_ids=(5, 6),
        logit_bias=((7, -100.0), (8, 1.5)),
        allowed_token_ids=(7, 8),
    )
    assert (call.stream, call.include_usage, call.running_usage, call.priority) == (True, True, True, -4)
    many = [f"stop {number}" for number in range(32)]
    assert chat(stop=many).sampling.stop == tuple(many)


def test_null_is_absent() -> None:
    names = ("max_tokens", "temperature", "stop", "n", "tools", "stream", "stream_options", "user", "logprobs", "seed")
    assert chat(**dict.fromkeys(names)) == chat()


def test_unknown_fields_are_tolerated() -> None:
    assert chat(vendor_extra={"deep": [1]}) == chat()


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts, "name": "n"}])
    assert call.prompt == ChatPrompt((Message("system", "x"), Message("user", "ab")))


def test_texts_may_be_called_as_the_other_api_calls_them() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompt == ChatPrompt((Message("user", "ab"),))


@pytest.mark.parametrize(
    ("said", "content"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": None, "reasoning_content": "hm"}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": "", "refusal": "I cannot."}, "I cannot."),
        ({"content": "Paris", "refusal": None}, "Paris"),
        ({"content": [{"type": "text", "text": "No: "}, {"type": "refusal", "refusal": "I cannot."}]}, "No: I cannot."),
        ({"content": [{"type": "thinking", "thinking": "hm"}, {"type": "output_text", "text": "Paris"}]}, "Paris"),
    ],
)
def test_turns_of_the_assistant_come_back_as_servers_tell_them(said: dict[str, object], content: str) -> None:
    prompt = chat(messages=[*HELLO, {"role": "assistant", **said}, *HELLO]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == Message("assistant", content)


@pytest.mark.parametrize("role", ["tool", "function"])
@pytest.mark.parametrize("said", [{"content": None}, {}])
def test_a_function_that_returns_nothing_has_an_empty_turn(role: str, said: dict[str, object]) -> None:
    prompt = chat(messages=[*HELLO, {"role": role, "name": "act", "tool_call_id": "a", **said}]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[1] == Message("tool", "", call_id="a")


def test_no_mass_at_all_is_the_likeliest_token() -> None:
    least = chat(top_p=0).sampling.top_p
    assert 0 < least < 1 / MOST_TOKENS
    assert completion(top_p=0).sampling.top_p == chat(top_p=1e-9).sampling.top_p == least
    assert chat(top_p=0.001).sampling.top_p == 0.001


def test_prompts_of_completions() -> None:
    assert completion(prompt="a").prompt == TextPrompt("a")
    assert completion(prompt=["a"]).prompt == TextPrompt("a")
    assert completion(prompt=[1, 2]).prompt == TokenPrompt((1, 2))
    assert completion(prompt=[[1, 2]]).prompt == TokenPrompt((1, 2))
    several = completion(prompt=["a", "b"], n=3)
    assert (several.prompt, several.others, several.n) == (TextPrompt("a"), (TextPrompt("b"),), 3)
    assert completion(prompt=[[1], [2, 3]]).others == (TokenPrompt((2, 3)),)


def test_log_probabilities_and_echo() -> None:
    assert chat().sampling.logprobs is None
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling.logprobs == 4
    assert completion(logprobs=0).sampling.logprobs == 0
    plain, scored = completion(echo=True), completion(echo=True, logprobs=2, max_tokens=0)
    assert (plain.echo, plain.unanswered, plain.sampling.prompt_logprobs) == (True, False, False)
    assert (scored.echo, scored.unanswered, scored.sampling.prompt_logprobs) == (True, True, True)
    assert (scored.sampling.logprobs, scored.sampling.max_tokens) == (2, 1)


def test_a_continuation_is_taken_off_the_messages() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Paris is"}]
    call = chat(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert call.prompt == ChatPrompt((Message("user", "hello"),))
    assert call.continuation == "Paris is"
    assert completion(overspill_continuation="so far").continuation == "so far"


WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"model": 3}, "model"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [3]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": 3, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None, "refusal": "x"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "messages[0].content[0].refusal"),
    ({"messages": [{"role": "user", "content": [{"type": "input_text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [*HELLO, {"role": "user", "content": 3}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages[1].tool_calls[0].function",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": True, "stream": True}, "stream_options"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": []}, "max_completion_tokens"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": "x"}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stop": 3}, "stop"),
    ({"stop": ["a", 3]}, "stop[1]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop": ["a" * 4000, "b" * 97]}, "stop[1]"),
    ({"stop": ""}, "stop"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"presence_penalty": "x"}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"frequency_penalty": {}}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-45}, "repetition_penalty"),
    ({"repetition_penalty": "x"}, "repetition_penalty"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"user": 3}, "user"),
    ({"service_tier": 3}, "service_tier"),
    ({"priority": "high"}, "priority"),
    ({"priority": 2**40}, "priority"),
    ({"metadata": "x"}, "metadata"),
    ({"store": "x"}, "store"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": "1"}, "n"),
    ({"logprobs": 3}, "logprobs"),
    ({"logprobs": "x"}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": False, "messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"custom": "x" * 4096}}, "chat_template_kwargs"),
    ({"echo": True}, "echo"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ({"return_token_ids": True}, "return_token_ids"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias.five"),
    ({"logit_bias": {"-5": 1}}, "logit_bias.-5"),
    ({"logit_bias": {str(2**31): 1}}, f"logit_bias.{2**31}"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": "text"}, "response_format"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions[0].name"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
    ({"stop_token_ids": [3, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"allowed_token_ids": [2**31]}, "allowed_token_ids[0]"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 257}, "bad_words"),
    ({"guided_json": 3}, "guided_json"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"continue_final_message": "x"}, "continue_final_message"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "messages[0].role"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    (
        {
            "messages": [{"role": "assistant", "content": "x"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        "messages",
    ),
]


@pytest.mark.parametrize("value", [str(2**64), "[" * 300 + "]" * 300])
def test_variables_of_a_template_that_cannot_be_written_again_are_named(value: str) -> None:
    body = f'{{"model": "m", "messages": {json.dumps(HELLO)}, "chat_template_kwargs": {{"custom": {value}}}}}'
    with pytest.raises(InvalidRequest, match="`chat_template_kwargs`: ") as raised:
        decode_chat(body.encode())
    assert raised.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(("fields", "param"), WRONG_CHAT, ids=[f"{p}-{i}" for i, (_, p) in enumerate(WRONG_CHAT)])
def test_wrong_chat_fields_are_named(fields: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        chat(**fields)
    assert raised.value.param == param
    assert f"`{param}`" in raised.value.message
    assert raised.value.status == 400


@pytest.mark.parametrize("value", ["9" * 25, "-" + "9" * 19, "[" * 300 + "]" * 300])
def test_template_variables_that_no_server_could_read_are_named(value: str) -> None:
    body = '{"model": "m", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"custom": %s}}'
    with pytest.raises(InvalidRequest) as raised:
        decode_chat((body % value).encode())
    assert raised.value.param == "chat_template_kwargs"


OF_OTHER_SERVERS = {
    "thinking_token_budget": (10, -1),
    "repetition_detection": ({"max_pattern_size": 5}, None),
    "logprob_token_ids": ([3], []),
    "return_token_offsets": (True, False),
    "return_prompt_text": (True, False),
    "mm_processor_kwargs": ({"num_crops": 4}, {}),
    "guided_whitespace_pattern": (" ", None),
    "custom_logit_processor": ("code", None),
    "lora_path": ("mine", None),
    "no_stop_trim": (True, False),
    "return_hidden_states": (True, False),
    "n_predict": (4, -1),
    "repeat_penalty": (1.2, 1.0),
    "dry_multiplier": (0.8, 0),
    "xtc_probability": (0.5, 0.0),
    "dynatemp_range": (0.5, 0),
    "top_n_sigma": (2.0, -1),
    "samplers": (["top_k"], None),
    "moderation": ({"model": "omni-moderation-latest"}, None),
    "watermarking": (True, False),
    "vllm_xargs": ({"level": 3}, {}),
    "kv_transfer_params": ({"do_remote_decode": True}, {}),
    "ec_transfer_params": ({"do_remote_encode": True}, None),
    "truncate_prompt_tokens": (100, -1),
    "n_probs": (5, 0),
    "lora": ([{"id": 0, "scale": 0.5}], []),
    "t_max_predict_ms": (500, -1),
    "thinking_budget_tokens": (10, -1),
}


@pytest.mark.parametrize(("name", "changing", "neutral"), [(name, *two) for name, two in OF_OTHER_SERVERS.items()])
def test_fields_of_other_servers_are_refused_where_they_would_change_the_answer(
    name: str, changing: object, neutral: object
) -> None:
    for decode in (chat, completion, response):
        with pytest.raises(InvalidRequest) as raised:
            decode(**{name: changing})
        assert raised.value.param == name
        assert decode(**{name: neutral}) == decode()


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("a", "b", "c")]


def allowed(mode: str, *names: str) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


def test_a_salt_may_stand_in_the_body() -> None:
    assert (chat(cache_salt="me").cache_salt, completion(cache_salt="me").cache_salt, chat().cache_salt) == (
        "me",
        "me",
        "",
    )
    for wrong in ("", 3, "x" * 1025):
        with pytest.raises(InvalidRequest) as raised:
            chat(cache_salt=wrong)
        assert raised.value.param == "cache_salt"


def test_some_of_the_tools_may_be_allowed() -> None:
    asked = chat(tools=TOOLS, tool_choice=allowed("required", "c", "a"))
    assert asked == chat(tools=[TOOLS[0], TOOLS[2]], tool_choice="required")
    assert chat(tools=TOOLS, tool_choice=allowed("auto", "b")) == chat(tools=[TOOLS[1]])
    for wrong in (allowed("auto"), allowed("auto", "d"), {"type": "allowed_tools"}, {"type": "custom"}):
        with pytest.raises(InvalidRequest) as raised:
            chat(tools=TOOLS, tool_choice=wrong)
        assert raised.value.param.startswith("tool_choice")
        assert "``" not in raised.value.message
    with pytest.raises(InvalidRequest, match="mode"):
        chat(tools=TOOLS, tool_choice=allowed("none", "a"))


def test_a_tool_without_a_type_is_a_function() -> None:
    assert chat(tools=[{"function": TOOLS[0]["function"]}]) == chat(tools=[TOOLS[0]])


def test_fields_that_change_no_answer_here_are_passed_over() -> None:
    harmless = {
        "service_tier": "auto",
        "store": True,
        "metadata": {"a": "b"},
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "stream_interval": 4,
        "cache_prompt": True,
        "best_of": 1,
        "suffix": "",
    }
    assert chat(**harmless) == chat()


CALLED = [
    ('{"city": "Paris"}', {"city": "Paris"}),
    ("", {}),
    ('{"city": "Par', {"invalid_json": '{"city": "Par'}),
    ("[1]", {"invalid_json": "[1]"}),
    ('"Paris"', {"invalid_json": '"Paris"'}),
    ("[" * 5000, {"invalid_json": "[" * 5000}),
]


@pytest.mark.parametrize(("arguments", "kept"), CALLED, ids=["object", "none", "cut", "list", "text", "nested"])
def test_a_call_of_the_history_is_kept_whatever_its_arguments_are(arguments: str, kept: dict[str, object]) -> None:
    called = {"name": "weather", "arguments": arguments}
    newer = {"tool_calls": [{"id": "call_1", "type": "function", "function": called}]}
    item = {"type": "function_call", "call_id": "call_1", **called}
    asked = [
        chat(messages=[*HELLO, {"role": "assistant", "content": None, **newer}, *HELLO]),
        chat(messages=[*HELLO, {"role": "assistant", "content": None, "function_call": called}, *HELLO]),
        decode_responses(orjson.dumps({"model": "m", "input": [*HELLO, item, *HELLO]}))[0],
    ]
    for request in asked:
        assert isinstance(request.prompt, ChatPrompt)
        (call,) = request.prompt.messages[1].tool_calls
        assert (call.name, json.loads(call.arguments)) == ("weather", kept)


WRONG_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 3}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], [-2]]}, "prompt[1][0]"),
    ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"prompt": [1, -2]}, "prompt[1]"),
    ({"prompt": [1, 2**31]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"best_of": 2}, "best_of"),
    ({"echo": 1}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
    ({"add_special_tokens": False}, "add_special_tokens"),
    ({"overspill_continuation": "x", "n": 2}, "overspill_continuation"),
    ({"overspill_continuation": "x", "echo": True}, "overspill_continuation"),
    ({"overspill_continuation": 3}, "overspill_continuation"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_COMPLETION)
def test_wrong_completion_fields_are_named(fields: dict, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        completion(**fields)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"{'model': 1}",
        b'{"model":"m"}{',
        b'{"model":"\xff","messages":[]}',
        b'{"model":"\\ud800","messages":[]}',
        b'{"model":"m","messages":[],"temperature":NaN}',
        b'{"model":"m","messages":[],"temperature":1e999}',
        b'{"model":"m","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model":"m","tools":' + b"[" * 50_000,
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode_chat(body)
    with pytest.raises(InvalidRequest):
        decode_completion(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted({next(iter(fields)) for fields, _ in WRONG_CHAT + WRONG_COMPLETION})


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_any_json_is_decoded_or_refused(fields: dict) -> None:
    """Nothing but `InvalidRequest` comes out, whatever the fields hold."""
    body = json.dumps({"model": "m", "messages": HELLO, "prompt": "x", **fields}).encode()
    assert decoded_or_refused(decode_chat, body)
    assert decoded_or_refused(decode_completion, body)


def decoded_or_refused(decode, body: bytes) -> bool:
    try:
        return isinstance(decode(body), ApiRequest)
    except InvalidRequest as error:
        return bool(error.message)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": -1}, "`max_tokens` = -1: Expected"),
        ({"temperature": 5.5}, "`temperature` = 5.5: Expected"),
        ({"messages": [{"role": "user", "content": 7}]}, "`messages[0].content` = 7: Expected"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
            "`messages[0].content[0].text` = 7",
        ),
        ({"metadata": 3}, "`metadata` = 3"),
        ({"stream": "my secret"}, "`stream`: Expected `bool | null`, got `str`"),
        ({"temperature": 5, "user": "x" * 100_000}, "`temperature` = 5: Expected"),
        ({"temperature": 5, "user": "x" * 2_000_000}, "`temperature` = 5: Expected"),
    ],
)
def test_a_number_at_fault_is_shown_and_a_text_is_not(fields: dict, told: str) -> None:
    raw = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    with pytest.raises(InvalidRequest) as raised:
        decode_chat(orjson.dumps(raw))
    assert raised.value.message.startswith(told)
    assert "secret" not in raised.value.message


def test_a_fault_deep_in_a_long_body_is_named_soon() -> None:
    prompt = [*range(60_000), -0.5, *range(1000)]
    with pytest.raises(InvalidRequest) as raised:
        decode_completion(orjson.dumps({"model": "m", "prompt": prompt}))
    assert raised.value.param == "prompt[60000]"


def test_a_field_too_long_to_be_searched_is_still_refused() -> None:
    prompt = [*range(400_000), -0.5]
    with pytest.raises(InvalidRequest) as raised:
        decode_completion(orjson.dumps({"model": "m", "prompt": prompt}))
    assert "prompt[400000]" in raised.value.message


def test_text_that_reads_like_a_message_of_the_decoder_is_no_path() -> None:
    with pytest.raises(InvalidRequest) as raised:
        decode_chat(b'{"model": "m", "messages": [], "x` - at `$.model": 1, "temperature": 9}')
    assert raised.value.param == "temperature"
