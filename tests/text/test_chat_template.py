"""Tests of rendered chats: the usual templates render as in transformers, and each error fails only its request."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.templates.chat_template import ChatTemplate
from trioserve.text.tokenizer import Tokenizer

CHATML = """{% for message in messages %}
    {%- if loop.first and message.role != 'system' -%}
        <|im_start|>system
You help.<|im_end|>
{% endif -%}
    <|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HEADERS = """{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|header|>system<|end_header|>\\n\\nToday is ' + strftime_now('%d %b %Y') + '\\n\\n' + ns.system + eos_token }}
{%- for message in messages %}
    {{- '<|header|>' ~ message.role ~ '<|end_header|>\\n\\n' ~ message.content | trim ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\\n\\n' }}{% endif %}"""

INSTRUCTIONS = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- if message.role == 'user' %}[INST] {{ message.content }} [/INST]
{%- elif message.role == 'assistant' %} {{ message.content.strip() }}{{ eos_token }}{% endif %}
{%- endfor %}"""

TOOLS = """{%- macro part(content) -%}
    {%- if content is string -%}{{ content }}
    {%- else -%}{%- for item in content -%}{{ item.text }}|{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<system># Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{{ tools[0].function.parameters | tojson(indent=2) }}</system>
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' and (loop.first or messages[loop.index0 - 1].role != 'tool') -%}<results>{%- endif -%}
    {%- if message.tool_calls -%}
        {%- for call in message.tool_calls -%}
            {%- if call.function.name == 'skip' -%}{%- continue -%}{%- endif -%}
            <call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</call>
        {%- endfor -%}
    {%- else -%}<{{ message.role }}>{{ part(message.content) }}</{{ message.role }}>
    {%- endif -%}
    {%- if loop.nextitem is not defined or loop.nextitem.role != message.role -%}
{{ '\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if enable_thinking is defined and enable_thinking is false -%}<no-thinking>{%- endif -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""

TRAINING = """{% for message in messages %}{{ message.role }}:
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{% endfor %}"""

CHAT = [
    {"role": "user", "content": " Hi, <b>&'\"ünïcödé'</b> 🦆 "},
    {"role": "assistant", "content": "  Hello {{ there }}\n"},
    {"role": "user", "content": "And\n\nnow?"},
]
SYSTEM_CHAT = [{"role": "system", "content": "Be\nbrief. "}, *CHAT]
TOOL_LIST = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": 'Finds <things> & "more", größer',
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
        },
    }
]
CALLS = [{"type": "function", "id": "c1", "function": {"name": name, "arguments": {"what": "ö", "n": 1}}}
         for name in ("find", "skip")]  # fmt: skip
TOOL_CHAT = [
    {"role": "user", "content": "Find it"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "it", "tool_call_id": "c1"},
    {"role": "tool", "content": "them", "tool_call_id": "c2"},
]


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def render(source: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> str:
    return template_of(source).render(ChatPrompt(messages=CHAT if messages is None else messages, **fields))


def refusal(source: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render(source, messages, **fields)
    return caught.value


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("messages", [CHAT, SYSTEM_CHAT, CHAT[:1], TOOL_CHAT], ids=["chat", "system", "one", "calls"])
@pytest.mark.parametrize("tools", [None, TOOL_LIST], ids=["plain", "tools"])
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("source", [CHATML, HEADERS, TOOLS, TRAINING], ids=["chatml", "headers", "tools", "training"])
def test_usual_templates_render_as_in_transformers(
    source: str, generate: bool, tools: list[dict[str, Any]] | None, messages: list[dict[str, Any]], reference: Any
) -> None:
    ours = render(source, messages, tools=tools, add_generation_prompt=generate)
    assert ours == reference.apply_chat_template(
        messages, tools=tools, chat_template=source, add_generation_prompt=generate, tokenize=False
    )


def test_alternating_roles_render_as_in_transformers(reference: Any) -> None:
    assert render(INSTRUCTIONS) == reference.apply_chat_template(CHAT, chat_template=INSTRUCTIONS, tokenize=False)


def test_template_arguments_reach_the_template_as_in_transformers(reference: Any) -> None:
    ours = render(TOOLS, template_arguments={"enable_thinking": False})
    assert "<no-thinking>" in ours
    assert ours == reference.apply_chat_template(
        CHAT, chat_template=TOOLS, tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


@pytest.mark.parametrize("source", [CHATML, HEADERS, TOOLS, TRAINING], ids=["chatml", "headers", "tools", "training"])
@pytest.mark.parametrize("ending", ["so", "so ", "so\n\n  "])
def test_a_continued_message_ends_the_prompt_as_in_transformers(source: str, ending: str, reference: Any) -> None:
    messages = [*CHAT, {"role": "assistant", "content": f"Like {ending}"}]
    ours = render(source, messages, continue_final_message=True)
    assert ours == reference.apply_chat_template(
        messages, chat_template=source, continue_final_message=True, tokenize=False
    )
    assert ours.rstrip().endswith("Like so")


def test_a_continued_message_replaces_the_generation_prompt() -> None:
    assert render(CHATML, CHAT[:2], continue_final_message=True, add_generation_prompt=True).endswith("there }}\n")


def test_continuing_a_message_that_the_template_does_not_show_is_refused() -> None:
    error = refusal("{{ messages[0].content }}", continue_final_message=True)
    assert error.param == "continue_final_message"
    assert refusal(TOOLS, [{"role": "user", "content": []}], continue_final_message=True).param == "messages"


@pytest.mark.slow
def test_the_template_of_the_packaged_model_renders_a_chat(smollm2: Tokenizer) -> None:
    assert smollm2.chat_template is not None
    text = smollm2.chat_template.render(ChatPrompt(messages=[{"role": "user", "content": "hi"}]))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode(text, add_special_tokens=False)[0] == 1


# --- content --------------------------------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LISTS_ONLY = "{% for m in messages %}{% for p in m['content'] %}({{ p['text'] }}){% endfor %}{% endfor %}"
LISTS_BY_NAME = "{% for m in messages %}{% set c = m.content %}{% for p in c %}({{ p.text }}){% endfor %}{% endfor %}"


@pytest.mark.parametrize(("source", "content", "text"), [
    (CHATML, PARTS, "one\ntwo"),
    (CHATML, [], ""),
    (CHATML, None, ""),
    (TOOLS, PARTS, "<user>one|two|</user>"),
    (TOOLS, "one", "<user>one</user>"),
    (TOOLS, None, "<user></user>"),
    (LISTS_ONLY, PARTS, "(one)(two)"),
    (LISTS_ONLY, "one", "(one)"),
    (LISTS_BY_NAME, "one", "(one)"),
    (CHATML, [{"type": "refusal", "refusal": "no"}, "plain"], "no\nplain"),
])  # fmt: skip
def test_content_is_converted_to_the_format_of_the_template(source: str, content: object, text: str) -> None:
    rendered = render(source, [{"role": "user", "content": content}])
    assert text in rendered
    assert "None" not in rendered
    assert "{'type'" not in rendered


@pytest.mark.parametrize(("messages", "param", "said"), [
    ([], "messages", "empty"),
    (["hi"], "messages[0]", "an object with a role"),
    ([{"content": "hi"}], "messages[0]", "an object with a role"),
    ([{"role": 1, "content": "hi"}], "messages[0]", "an object with a role"),
    ([CHAT[0], {"role": "user", "content": 5}], "messages[1].content", "is int"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]",
     "'image_url'"),
    ([{"role": "user", "content": [{"type": "video_url"}]}], "messages[0].content[0]", "read no videos"),
    ([{"role": "user", "content": [PARTS[0], {"text": "no type"}]}], "messages[0].content[1]", "of type None"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", "has no text"),
    ([{"role": "user", "content": [7]}], "messages[0].content[0]", "is int"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
     "messages[0].tool_calls[0]", "is not JSON"),
])  # fmt: skip
@pytest.mark.parametrize("source", [CHATML, TOOLS])
def test_content_other_than_text_is_refused_and_the_error_names_its_field(
    source: str, messages: Any, param: str, said: str
) -> None:
    error = refusal(source, messages)
    assert error.param == param
    assert said in str(error)


def test_tool_call_arguments_in_json_become_objects(reference: Any) -> None:
    as_text = [{"function": {"name": "find", "arguments": '{"what": "ö", "n": 1}'}}]
    as_object = [{"function": {"name": "find", "arguments": {"what": "ö", "n": 1}}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls} for calls in (as_text, as_object)]
    first, second = (render(TOOLS, [message]) for message in messages)
    assert first == second
    assert '<call>{"name": "find", "arguments": {"what": "ö", "n": 1}}</call>' in first
    empty = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]
    assert '"arguments": {}' in render(TOOLS, empty)


@pytest.mark.parametrize(("arguments", "said"), [
    ("[" * 100_000 + "]" * 100_000, "too many values|nested more than 64 deep"),
    ("[" * 10_000 + "]" * 10_000, "nested more than 64 deep"),
    ('{"a":' * 10_000 + "1" + "}" * 10_000, "nested more than 64 deep"),
    ("[" * 65 + "]" * 65, "nested more than 64 deep"),
    ("[" * 10_000, "nested more than 64 deep|is not JSON"),
    ("[" + "0," * 100_000 + "0]", "more than 100000 commas"),
    ("1" * 10_000, "is not JSON"),
    ('"\\ud800', "is not JSON"),
])  # fmt: skip
def test_tool_call_arguments_are_bounded_before_rendering(arguments: str, said: str) -> None:
    error = refusal(TOOLS, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
    assert error.param == "messages[0].tool_calls[0]"
    assert re.search(said, str(error))


def test_the_bound_of_values_covers_all_tool_calls_of_a_chat() -> None:
    call = {"function": {"name": "f", "arguments": "[" + "0," * 30_000 + "0]"}}
    messages = [{"role": "assistant", "tool_calls": [call, call]}] * 2
    assert refusal(TOOLS, messages).param == "messages[1].tool_calls[1]"


def test_tool_call_arguments_at_the_depth_limit_are_rendered() -> None:
    deep = "[" * 64 + "]" * 64
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    assert deep in render(TOOLS, [message])


def test_rendering_does_not_change_the_callers_messages() -> None:
    messages = [{"role": "assistant", "content": list(PARTS), "tool_calls": [CALLS[0]]}]
    before = repr(messages)
    render(TOOLS, messages, continue_final_message=False)
    render(LISTS_ONLY, messages, continue_final_message=True)
    assert repr(messages) == before


# --- templates ------------------------------------------------------------------------------------------------------


def test_a_template_for_tools_is_used_only_with_tools() -> None:
    template = ChatTemplate("plain", bos_token=None, eos_token=None, tool_source="tools")
    assert template.render(ChatPrompt(messages=CHAT)) == "plain"
    assert template.render(ChatPrompt(messages=CHAT, tools=[])) == "plain"
    assert template.render(ChatPrompt(messages=CHAT, tools=TOOL_LIST)) == "tools"


def test_a_template_in_the_request_replaces_the_models_template() -> None:
    assert render(CHATML, chat_template="{{ bos_token }}{{ messages | length }}") == "<s>3"
    assert refusal(CHATML, chat_template="{% if").param == "chat_template"


def test_an_undefined_special_token_renders_as_empty_text() -> None:
    assert ChatTemplate("[{{ bos_token }}]", bos_token=None, eos_token=None).render(ChatPrompt(messages=CHAT)) == "[]"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message"])
def test_template_arguments_cannot_override_fields_of_the_request(name: str) -> None:
    assert name in str(refusal(CHATML, template_arguments={name: []}))


def test_strftime_now_returns_the_current_date() -> None:
    before = datetime.datetime.now().strftime("%Y-%m-%d")
    rendered = render("{{ strftime_now('%Y-%m-%d') }}")
    assert rendered in (before, datetime.datetime.now().strftime("%Y-%m-%d"))


def test_tojson_in_a_template_does_not_escape_html() -> None:
    source = "{{ messages[0] | tojson }}{{ [1, {'b': 2, 'a': 1}] | tojson(separators=(',', ':'), sort_keys=true) }}"
    rendered = render(source, [{"role": "user", "content": "<ü>&'"}])
    assert rendered == '{"role": "user", "content": "<ü>&\'"}[1,{"a":1,"b":2}]'
    assert render("{{ 'ü' | tojson(ensure_ascii=true) }}") == '"\\u00fc"'


@pytest.mark.parametrize(("source", "said"), [
    (INSTRUCTIONS, "roles must alternate user/assistant"),
    ("{{ raise_exception('not this: ' ~ messages[0].role) }}", "not this: assistant"),
    ("{% for x in y", "is not valid"),
    ("{{ " + "(" * 5000, "is not valid: RecursionError"),
    ("{{ messages[0].content + 1 }}", "TypeError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ messages[0].nothing.at_all }}", "has no attribute 'nothing'"),
    ("{{ nowhere() }}", "'nowhere' is undefined"),
    ("{{ [] | nofilter }}", "No filter named 'nofilter'"),
    ("{% include 'other' %}", "TypeError"),
    ("x" * 300_000, "at most 262144"),
])  # fmt: skip
def test_an_error_in_a_template_is_an_invalid_request(source: str, said: str) -> None:
    error = refusal(source, CHAT[1:])
    assert said in str(error)
    assert error.param == "messages"


@pytest.mark.parametrize("source", [
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ dict.mro() }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% set messages[0].role = 'x' %}",
])  # fmt: skip
def test_templates_cannot_reach_internals_of_python(source: str) -> None:
    refusal(source)


@pytest.mark.parametrize("expression", [
    "''.__class__", "''['__class__']", "'' | attr('__class__')", "raise_exception.__globals__",
    "'{0.__class__}'.format(messages)", "messages.__class__", "namespace.__init__",
])  # fmt: skip
def test_internals_of_python_render_as_empty_text(expression: str) -> None:
    assert render("[{{ " + expression + " }}]") == "[]"
