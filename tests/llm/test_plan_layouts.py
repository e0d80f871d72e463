"""All layouts of a cluster: each once, those that cannot be with a reason, ranked, and the best one explained."""

import pytest

from configs.loader import compose_config
from llm.plan_config import PlanConfig
from llm.plan_layouts import Planner, extrapolate
from llm.plan_reason import KINDS, why
from llm.plan_shapes import rank_messages


def planner_of(*overrides: str) -> Planner:
    small = ["model=1b", "nodes=1", "micro_batch_size=[1]", "global_batch_tokens=131072", "dry_run=false"]
    return Planner(compose_config(PlanConfig, "plan", [*small, *overrides]))


def test_every_product_of_degrees_is_a_layout_or_has_a_reason():
    planner = planner_of("zero=[0]", "checkpointing=[none]", "pp_schedule=[1f1b]", "cp_mode=[ulysses]")
    found = {(choice.tp, choice.pp, choice.cp): degrees for choice, degrees, _ in planner.choices()}
    expected = {(tp, pp, cp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8) for cp in (1, 2) if tp * pp * cp <= 8}
    assert found.keys() == expected
    assert all(degrees.dp * tp * pp * cp == 8 for (tp, pp, cp), degrees in found.items())
    assert "must divide the 8 ranks" in planner.refused["tp x pp x cp"]


def test_what_cannot_be_is_left_out_with_what_to_use():
    planner = planner_of("pp=[2]", "tp=[1]", "cp=[1,2]", "pp_schedule=[zero_bubble]", "cp_mode=[ring]", "zero=[0,3]")
    assert not list(planner.choices())
    reasons = " | ".join(planner.refused.values())
    assert "use compile=none" in reasons
    assert planner_of("pp=[2]", "tp=[1]", "cp=[1]", "pp_schedule=[zero_bubble]", "zero=[0]", "compile=none").rows()


def test_graphs_are_planned_for_pipelines_alone_and_make_them_faster():
    settings = ("pp=[1,2]", "tp=[1]", "cp=[1]", "pp_schedule=[zero_bubble_h2]", "zero=[0]", "compile=none")
    eager = {row.name: row for row in planner_of(*settings).rows()}
    planner = planner_of(*settings, "kernels.cuda_graph=true")
    graphs = {row.name: row for row in planner.rows()}
    assert graphs and set(graphs) < set(eager) and all(row.choice.pp == 2 for row in graphs.values())
    assert any("runs on one rank or with pp > 1" in reason for reason in planner.refused.values())
    assert all(row.step_s < eager[name].step_s for name, row in graphs.items())


@pytest.fixture(scope="module")
def planned():
    planner = planner_of("hardware=h200", "checkpointing=[none]", "pp_schedule=[1f1b,interleaved]")
    return planner, planner.rows()


def test_layouts_are_ranked_within_the_memory_limit(planned):
    planner, rows = planned
    fitting = [row for row in rows if planner.fits(row)]
    assert [row.step_s for row in fitting] == sorted(row.step_s for row in fitting) and len(fitting) > 20
    names = {row.name for row in fitting}
    assert {"zero=0,dp=8", "zero=0,dp=4,tp=2", "zero=0,dp=4,pp=2,pp_schedule=1f1b"} <= names
    by_name = {row.name: row for row in fitting}
    # A share of the layers, not all of the memory; the price is waiting, in the layers or for other stages.
    tensor, stages = by_name["zero=0,dp=1,tp=8"], by_name["zero=0,dp=1,pp=8,pp_schedule=1f1b"]
    assert max(tensor.memory.peak_bytes, stages.memory.peak_bytes) < by_name["zero=0,dp=8"].memory.peak_bytes
    assert tensor.axis_bytes["tp"] > 10 * stages.axis_bytes["pp"] > 0
    assert stages.idle_s > 0.1 * stages.step_s and tensor.exposed_s > 0.1 * tensor.step_s
    assert by_name["zero=0,dp=8"].idle_s == 0.0


def test_the_best_layout_is_explained_beside_the_best_of_every_other_kind(planned):
    planner, rows = planned
    said = why([row for row in rows if planner.fits(row)], [], planner.limit_bytes)
    assert said[0].startswith(f"{rows[0].name} with micro-batches of 1 is best")
    others = {sentence.split(":")[0] for sentence in said[1:]}
    assert len(others) == len(KINDS) - 1 and {"tp", "pp", "a product"} <= others
    assert any("more waiting for messages" in sentence for sentence in said if sentence.startswith("tp"))
    large = why(rows[:1], [row for row in rows if row.choice.tp == 2], 1.0)
    assert any("tp: does not fit" in sentence for sentence in large) and why([], rows, 1.0) == []


@pytest.mark.parametrize("overrides", [["pp=[2]", "tp=[1]"], ["tp=[2]", "pp=[1]"], ["tp=[2]", "pp=[4]"]])
def test_figures_of_many_micro_batches_follow_from_few(overrides):
    planner = planner_of("cp=[1]", "zero=[0]", "checkpointing=[none]", "pp_schedule=[1f1b]", *overrides)
    ((choice, degrees, count),) = planner.choices()
    assert count == 131072 // (4096 * degrees.dp)

    def sent(micro_batches: int) -> dict[str, float]:
        train = planner.train_config(choice, micro_batches)
        messages = rank_messages(planner.params, train, 8, micro_batches)
        return {"bytes": sum(message.nbytes for message in messages), "calls": len(messages)}

    assert extrapolate(sent, 21, choice.pp) == sent(21)
