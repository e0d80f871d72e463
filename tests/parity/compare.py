"""A layout's run beside the reference, in the order that shows faults first: gradients, norm, parameters, losses."""

from dataclasses import asdict

from torch import Tensor

from llm.args import TrainConfig
from llm.plan_shapes import params_of, predicted_traffic
from tests.parity.cases import Case, ParityModel
from tests.parity.ranks import RankResult
from tests.parity.reference import Result


class Mismatch(AssertionError):
    """The layout does not compute what one device does; the message names the first thing that differs."""


def compare(ranks: list[RankResult], reference: Result, case: Case) -> None:
    """Raise Mismatch unless every rank has the same bits and the first rank's are near enough to the reference."""
    result = ranks[0].result
    compare_gradients(result.gradients, reference.gradients, case.gradient_error)
    compare_numbers("norm before clipping", result.norms, reference.norms, case.norm_error)
    for name, expected in reference.parameters.items():
        check_near(
            f"parameter {name} after {case.steps} steps", result.parameters[name], expected, case.parameter_error
        )
    compare_numbers("logged loss", result.losses, reference.losses, case.loss_error)
    for rank, other in enumerate(ranks):
        differ = sorted(name for name, digest in other.digests.items() if digest != ranks[0].digests.get(name))
        if differ or other.digests.keys() != ranks[0].digests.keys():
            raise Mismatch(f"rank {rank} holds other bits than rank 0: {differ[:5]}")
        if case.tie and not other.tied:
            raise Mismatch(f"rank {rank}: the tied embedding and output tables differ")


def compare_gradients(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], error: float) -> None:
    if got.keys() != expected.keys():
        raise Mismatch(f"gradients of {sorted(got.keys() ^ expected.keys())} on one side only")
    for name, gradient in expected.items():
        if (got[name] is None) != (gradient is None):
            raise Mismatch(
                f"gradient of {name}: {'missing' if got[name] is None else 'there'}, not so in the reference"
            )
        if gradient is not None:
            check_near(f"gradient of {name}", got[name], gradient, error)


def compare_numbers(what: str, got: list[float], expected: list[float], error: float) -> None:
    for step, (value, wanted) in enumerate(zip(got, expected, strict=True)):
        if not abs(value - wanted) <= error * abs(wanted):
            raise Mismatch(f"{what} at step {step}: {value!r}, in the reference {wanted!r} (relative bound {error})")


def check_near(what: str, got: Tensor, expected: Tensor, error: float) -> None:
    """|got - expected| <= error * the largest entry of expected."""
    if got.shape != expected.shape:
        raise Mismatch(f"{what}: shape {tuple(got.shape)}, in the reference {tuple(expected.shape)}")
    scale = expected.double().abs().max().item()
    difference = (got.double() - expected.double()).abs().max().item()
    if not difference <= error * scale:
        raise Mismatch(f"{what}: differs by {difference:.3g} where entries reach {scale:.3g} (relative bound {error})")


def compare_communication(ranks: list[RankResult], config: TrainConfig, model: ParityModel, micro_batches: int) -> None:
    """What each rank sent in its second step is, call for call and byte for byte, what the cost model says."""
    params = params_of(model, config.optimizer.name)
    fields = ("op", "axis", "dtype", "ranks", "calls", "bytes")
    for rank, result in enumerate(ranks):
        expected = [asdict(traffic) for traffic in predicted_traffic(params, config, len(ranks), micro_batches, rank)]
        wanted = sorted(tuple(traffic[field] for field in fields) for traffic in expected)
        sent = sorted(tuple(line[field] for field in fields) for line in result.comm[1])
        if sent != wanted:
            raise Mismatch(f"rank {rank} sent {sent}, predicted {wanted}")
