"""Where to cut a model into stages: contiguous pieces, so that the dearest stage is as cheap as it can be."""

from functools import cache
from itertools import pairwise


@cache
def split_by_cost(costs: tuple[float, ...], stages: int) -> list[range]:
    """Cut pieces of these costs into so many stages, none of them empty; returns each stage's pieces.

    The largest sum of a stage is the least there is; among such cuts the sum of squares is, which evens out the rest.
    Raises ValueError when there are fewer pieces than stages.
    """
    if stages > len(costs):
        raise ValueError(f"{len(costs)} pieces cannot make {stages} stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(first: int, left: int) -> tuple[float, float, int]:
        """Pieces from `first` on in `left` stages: the largest sum, the sum of squares, the first stage's end."""
        if left == 1:
            own = sums[-1] - sums[first]
            return own, own * own, len(costs)
        found = (float("inf"), float("inf"), first)
        for end in range(first + 1, len(costs) - left + 2):
            own = sums[end] - sums[first]
            most, squares, _ = best(end, left - 1)
            found = min(found, (max(own, most), own * own + squares, end))
        return found

    bounds = [0]
    for left in range(stages, 0, -1):
        bounds.append(best(bounds[-1], left)[2])
    return [range(first, end) for first, end in pairwise(bounds)]
