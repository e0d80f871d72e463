"""Chat templates beside transformers' apply_chat_template, and what a hostile one may not do."""

import json

import pytest

from configs.errors import UserError
from llm.chat_template import MAX_CHARS, ChatTemplate, load_chat_template, stop_ids

transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_LIKE = """{{- bos_token }}
{%- if tools is not none and tools %}
    {{- "Tools: " + (tools | tojson(indent=2)) + "\\n" }}
{%- endif %}
{%- set state = namespace(count=0) %}
{%- for message in messages %}
    {%- if not message.content is defined %}
        {%- continue %}
    {%- endif %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- '[' + message['role'] + '] ' + message['content'] | trim + '\\n' }}
    {%- endif %}
    {%- set state.count = state.count + 1 %}
{%- endfor %}
{{- '#' ~ state.count }}
{%- if add_generation_prompt %}
    {{- '[assistant] ' }}
{%- endif %}
"""
QWEN_LIKE = """{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not message.content.startswith('<tool_response>') %}
{{ index }}:{{ message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- endif %}
{%- endfor %}
{{ {'a': '<é>', 'b': messages|length} | tojson }}{{ dict(x=1).x if enable_thinking is defined and enable_thinking }}
"""
CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "<b> & 'é' \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " <think>x</think>\nb ", "name": None},
        {"role": "user", "content": "</think>\n\nc"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": "é<"}}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def theirs(tiny_corpus):
    fast = transformers.AutoTokenizer.from_pretrained(tiny_corpus.tokenizer)
    fast.bos_token, fast.eos_token = TOKENS["bos_token"], TOKENS["eos_token"]
    return fast


@pytest.mark.parametrize("source", [CHATML, LLAMA3_LIKE, QWEN_LIKE], ids=["chatml", "llama3", "qwen"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"enable_thinking": True}], ids=["", "tools", "variable"])
@pytest.mark.parametrize("prompt", [True, False])
def test_text_matches_transformers(theirs, source, messages, options, prompt):
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **options
    )
    assert ChatTemplate(source, TOKENS).render(messages, prompt, **options) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% set n = namespace(__class__=1) %}{{ n }}",
        "{% include '/etc/passwd' %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{{ lipsum.__globals__.os }}",
    ],
)
def test_a_hostile_template_is_refused(source):
    with pytest.raises(UserError, match="refuses the conversation") as caught:
        ChatTemplate(source).render(CONVERSATIONS[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{{ '{0.__class__}'.format(messages) }}", "{{ lipsum.__globals__ }}"])
def test_an_unsafe_attribute_reads_as_nothing(source):
    assert ChatTemplate(source).render(CONVERSATIONS[0]) == ""


def test_output_without_end_is_cut_off():
    source = "{% for i in range(90000) %}{% for j in range(90000) %}" + "x" * 10_000 + "{% endfor %}{% endfor %}"
    with pytest.raises(UserError, match=f"more than {MAX_CHARS} characters"):
        ChatTemplate(source).render(CONVERSATIONS[0])


def test_what_a_template_or_a_message_gets_wrong_is_one_line():
    with pytest.raises(UserError, match="is no Jinja template"):
        ChatTemplate("{% if %}")
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        refusing.render(CONVERSATIONS[0])
    with pytest.raises(UserError, match="refuses the conversation"):
        ChatTemplate(CHATML).render([{"role": "user"}])
    with pytest.raises(UserError, match="type object"):
        ChatTemplate(CHATML).render([{"role": "user", "content": object()}])


def test_a_template_is_found_beside_a_checkpoint(tmp_path):
    assert load_chat_template(tmp_path) is None
    assert stop_ids(tmp_path) == []
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(tmp_path).render([]) == "<s>old"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}new")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert load_chat_template(tmp_path).render([]) == "</s>new"
    assert stop_ids(tmp_path) == [2, 5]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert stop_ids(tmp_path) == [2]
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not UTF-8"):
        load_chat_template(tmp_path)
