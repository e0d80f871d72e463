"""The questions of task harnesses, against one forward pass a token."""

import pytest
import torch

from configs.errors import UserError
from llm.args import ModelConfig
from llm.bpe_tokenizer import Tokenizer
from llm.engine_request import RequestParams
from llm.evaluation_tasks import TaskConfig, TaskModel
from llm.sampling import SamplingConfig
from llm.transformer import Transformer
from llm.transformer_init import initialise
from tests.tolerances import FP32_FORWARD

GREEDY = SamplingConfig(temperature=0.0)
PAIRS = [
    ("The cat", " ran home"),
    ("The cat ran", " to the big house and"),
    ("", "One"),
    ("A dog ", "ate"),
    ("A", " b"),
]


@pytest.fixture(scope="module")
def tokenizer(tiny_corpus):
    return Tokenizer.load(tiny_corpus.tokenizer)


@pytest.fixture(scope="module")
def task_model(tokenizer):
    config = ModelConfig(vocab_size=384, max_seq_len=24, d_model=32, num_layers=2, num_heads=4, d_ff=48)
    model = Transformer(config)
    initialise(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    return TaskModel(model.eval(), tokenizer, TaskConfig(24, batch_size=2), torch.device("cpu"))


def by_hand(task_model, context_ids, continuation_ids):
    """Log p and greediness of a continuation, a forward pass a token."""
    row, total, greedy = list(context_ids), 0.0, True
    for token in continuation_ids:
        logits = task_model.model(torch.tensor([row]))[0, -1].double()
        total += logits.log_softmax(-1)[token].item()
        greedy &= logits.argmax().item() == token
        row.append(token)
    return total, greedy


def test_log_likelihoods_match_one_forward_pass_a_token(task_model, tokenizer):
    answers = task_model.log_likelihoods(PAIRS)
    for (context, continuation), (log_p, greedy) in zip(PAIRS, answers, strict=True):
        whole = tokenizer.encode(context + continuation)
        before = len(tokenizer.encode(context.rstrip()))
        start = whole[:before] or [tokenizer.eot_id]
        expected = by_hand(task_model, start, whole[before:])
        assert log_p == pytest.approx(expected[0], rel=FP32_FORWARD) and greedy == expected[1]


def test_what_greedy_decoding_writes_is_greedy_and_anything_else_is_not(task_model, tokenizer):
    context = "The cat ran"
    row = tokenizer.encode(context)
    written = []
    for _ in range(6):
        logits = task_model.model(torch.tensor([row + written]))[0, -1, : tokenizer.vocab_size]
        written.append(logits.argmax().item())
    text = task_model.write([context], [RequestParams(GREEDY, 6)])[0]
    assert text == tokenizer.decode([i for i in written if i != tokenizer.eot_id])
    pair = (row, written[:3])
    other = (row, [*written[:2], (written[2] + 1) % 300])
    greedy = [answer[1] for answer in task_model.score_batch([pair, other])]
    assert greedy == [True, False]


def test_a_long_context_loses_its_beginning(task_model, tokenizer):
    context, continuation = "The cat and the dog ran home, " * 5, "and ate"
    whole = tokenizer.encode(context + continuation)
    before = len(tokenizer.encode(context.rstrip()))
    count = len(whole) - before
    kept = whole[-25:]
    (answer,) = task_model.log_likelihoods([(context, continuation)])
    assert answer[0] == pytest.approx(by_hand(task_model, kept[: 25 - count], kept[-count:])[0], rel=FP32_FORWARD)


def test_writing_goes_on_from_the_end_of_a_long_context(task_model, tokenizer):
    context = "The cat and the dog ran home, " * 5 + "and ate"
    row = tokenizer.encode(context)[-(24 - 6) :]  # as much as leaves room for six tokens
    written = []
    for _ in range(6):
        logits = task_model.model(torch.tensor([row + written]))[0, -1, : tokenizer.vocab_size]
        written.append(logits.argmax().item())
    assert tokenizer.eot_id not in written, "or the texts may end earlier"
    assert task_model.write([context], [RequestParams(GREEDY, 6)]) == [tokenizer.decode(written)]


def test_document_start_puts_end_of_text_before_every_context(task_model, tokenizer):
    config = TaskConfig(24, document_start=True)
    model = TaskModel(task_model.model, tokenizer, config, torch.device("cpu"))
    assert model.encode_pair("The", " cat")[0] == [tokenizer.eot_id, *tokenizer.encode("The")]
    assert model.encode_pair("", "cat") == task_model.encode_pair("", "cat")


def test_a_whole_text_is_scored_token_by_token(task_model, tokenizer):
    texts = [
        "The cat ran home",
        "x",
        "The dog and the cat ate the bread in the house by the river, and then they slept.",
    ]
    for text, log_p in zip(texts, task_model.text_log_likelihoods(texts), strict=True):
        row = [tokenizer.eot_id, *tokenizer.encode(text)]
        expected = by_hand(task_model, row[:1], row[1:25])[0]
        if len(row) > 25:  # the last window is moved back, so that it is full
            expected += by_hand(task_model, row[-25 : -(len(row) - 25)], row[-(len(row) - 25) :])[0]
        assert log_p == pytest.approx(expected, rel=FP32_FORWARD)


def test_writing_ends_at_the_first_stop_string_wherever_the_rows_are(task_model):
    contexts = ["The cat", "A", "The dog ate the"]
    whole = task_model.write(contexts, [RequestParams(GREEDY, 8)] * 3)
    assert any(len(text) > 2 for text in whole)
    stop = whole[0][1:3]
    cut = task_model.write(contexts, [RequestParams(GREEDY, 8, stop=(stop, "never there"))] * 3)
    assert cut == [text.split(stop)[0] for text in whole] and cut[0] != whole[0]


def test_what_cannot_be_asked_is_refused(task_model):
    with pytest.raises(UserError, match="a continuation is empty"):
        task_model.log_likelihoods([("The", "")])
    with pytest.raises(UserError, match="the window holds 24"):
        task_model.log_likelihoods([("The", " cat" * 60)])
    with pytest.raises(UserError, match="leave no room"):
        task_model.write(["The"], [RequestParams(GREEDY, 24)])
