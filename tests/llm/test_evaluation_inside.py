"""Attention maps against the model's own output, head scores on heads built to have them, embeddings by hand."""

import json

import pytest
import torch

from configs.errors import UserError
from configs.loader import compose_config
from llm.args import ModelConfig, TrainConfig
from llm.evaluating_inside import InsideConfig, chosen_layers, look_inside
from llm.evaluation_attention import attention_maps, recording, score_heads
from llm.evaluation_embeddings import nearest, principal_components
from llm.figures_inside import token_kind
from llm.training import train
from llm.transformer import Transformer
from llm.transformer_init import initialise
from tests.tolerances import FP32_FORWARD


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    config = ModelConfig(vocab_size=64, max_seq_len=32, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48,
                         qk_norm=True, attention=request.param)  # fmt: skip
    model = Transformer(config)
    initialise(model, seed=1)
    return model.eval()


def test_maps_times_values_are_what_the_model_computes(model):
    token_ids = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    values, outputs = [], []
    for block in model.blocks.values():
        block.attention.v_proj.register_forward_hook(lambda module, args, output: values.append(output))
        block.attention.o_proj.register_forward_pre_hook(lambda module, args: outputs.append(args[0]))
    before = model(token_ids)
    values.clear(), outputs.clear()
    maps = attention_maps(model, token_ids)
    assert maps.shape == (2, 2, 4, 12, 12)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, 4, 12))
    assert maps.triu(1).abs().max() == 0
    for layer in range(2):
        v = values[layer].view(2, 12, 2, 8).repeat_interleave(2, dim=2)  # (B, S, H, D)
        expected = torch.einsum("bhts,bshd->bthd", maps[:, layer], v).reshape(2, 12, 32)
        torch.testing.assert_close(outputs[layer], expected, rtol=FP32_FORWARD, atol=FP32_FORWARD)
    torch.testing.assert_close(model(token_ids), before, rtol=0, atol=0)


def test_backends_are_put_back_even_after_an_error(model):
    attends = [block.attention.attend for block in model.blocks.values()]
    with pytest.raises(RuntimeError, match="stop"), recording(model):
        raise RuntimeError("stop")
    assert [block.attention.attend for block in model.blocks.values()] == attends
    plain = lambda q, k, v, ctx: (v.repeat_interleave(2, dim=2), None)  # noqa: E731
    for block in model.blocks.values():
        del block.attention.attend
        block.attention.attend = plain
    with recording(model):
        pass
    assert all(block.attention.attend is plain for block in model.blocks.values())


class FixedHeads(torch.nn.Module):
    """Stands for a model: hands queries and keys to its attention that make each head do one thing."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 1)
        attention = torch.nn.Module()
        attention.attend = lambda q, k, v, ctx: (q, None)
        block = torch.nn.Module()
        block.attention = attention
        self.blocks = torch.nn.ModuleDict({"0": block})

    def hidden_states(self, token_ids, ctx):
        B, T = token_ids.shape
        place = torch.eye(64)[:T].expand(B, T, 64)
        shifted = torch.cat((place[:, :1], place[:, :-1]), dim=1)  # the query of t is the key of t - 1
        word = torch.eye(64)[token_ids]  # keys: the token before; queries: the token itself
        word_before = torch.cat((torch.zeros(B, 1, 64), word[:, :-1]), dim=1)
        first = place[:, :1].expand(B, T, 64)
        q = torch.stack((first, place, shifted, word), dim=2) * 1e3
        k = torch.stack((place, place, place, word_before), dim=2)
        return self.blocks["0"].attention.attend(q, k, k, ctx)[0]


def test_scores_tell_heads_apart_that_each_do_one_thing():
    scores = score_heads(FixedHeads(), torch.arange(20)[None], num_ids=64)
    rows = {name: values[0].tolist() for name, values in vars(scores).items()}
    assert rows["first"][:3] == pytest.approx([1, 0, 0], abs=1e-4)
    assert rows["own"][:3] == pytest.approx([0, 1, 0], abs=1e-4)
    assert rows["previous"][:3] == pytest.approx([0, 0, 1], abs=1e-4)
    assert rows["distance"][:3] == pytest.approx([9.5, 0, 0.95], abs=1e-3)
    assert rows["induction"][3] > 0.8 and max(rows["induction"][:3]) < 0.2


def test_neighbours_are_by_cosine_and_never_the_token_itself():
    table = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [-1.0, 0.0], [9.0, 9.0]])
    (near,) = nearest(table, [0], 3)
    assert [i for i, _ in near] == [1, 4, 2], "long vectors are not near for their length"
    assert near[1][1] == pytest.approx(0.5**0.5) and near[2][1] == pytest.approx(0.0)
    assert len(nearest(table, [2], 50)[0]) == 4


def test_components_match_a_singular_value_decomposition():
    table = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([5.0, 3, 2, 1, 0.5, 0.1]) + 7
    found = principal_components(table, 3)
    rows = (table - table.mean(0)).double()
    u, s, _ = torch.linalg.svd(rows, full_matrices=False)
    torch.testing.assert_close(found.coordinates.abs().double(), (u * s)[:, :3].abs(), rtol=1e-4, atol=1e-4)
    assert found.shares == pytest.approx((s**2 / (s**2).sum())[:3].tolist())
    assert (found.directions.gather(0, found.directions.abs().argmax(0)[None]) > 0).all()


@pytest.mark.parametrize(
    ("piece", "kind"),
    [(b" the", "word, with a space"), (b"ing", "piece of a word"), (b" 42", "number"), (b"),", "punctuation"),
     (b"\n  ", "white space"), (b"\xc3", "other"), (b"x1", "other")],
)  # fmt: skip
def test_kinds_of_tokens(piece, kind):
    assert token_kind(piece) == kind


def test_the_script_writes_pictures_and_numbers(tiny_corpus, tmp_path, capsys):
    padded = ["max_steps=2", "model.vocab_size=384"]  # the tokenizer has 320 ids
    train(compose_config(TrainConfig, "training", [*tiny_corpus.overrides(tmp_path), *padded]))
    words = [" the", "A", "Axq"]
    config = InsideConfig(run=str(tmp_path / "tiny"), text="The cat ran home", words=words, device="cpu")
    found = look_inside(config)
    assert found["neighbours"]["Axq"] == found["neighbours"]["A"], "a word of several tokens stands for its first"
    written = json.loads((tmp_path / "tiny" / "inside" / "inside.json").read_text())
    assert written["neighbours"] == found["neighbours"] and len(found["neighbours"][" the"]) == 8
    assert len(written["heads"]["first"]) == 2 and len(written["heads"]["first"][0]) == 4
    for name in ("embedding_map", "attention_heads"):
        assert (tmp_path / "tiny" / "inside" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (tmp_path / "tiny" / "inside" / f"{name}.pdf").read_bytes()[:4] == b"%PDF"
    assert "nearest tokens by cosine" in capsys.readouterr().out
    with pytest.raises(UserError, match="it must have 2 to 31"):
        look_inside(InsideConfig(run=str(tmp_path / "tiny"), text="The cat ran home " * 20, device="cpu"))
    with pytest.raises(UserError, match=r"layer 9 is not in 0\.\.1"):
        chosen_layers([9], 2)
    assert chosen_layers([], 30) == [0, 4, 8, 12, 17, 21, 25, 29]
