"""A rank that stays away, dies, or calls something else: the others end in time and say who and where."""

import os
import time

import pytest
import torch

from parallel.collectives import all_reduce_sum, barrier, start_all_reduce
from parallel.collectives_log import Call, CollectiveError
from parallel.collectives_watchdog import describe_rank
from parallel.mesh_degrees import Degrees
from tests.parallel.pool import Pool

pytestmark = pytest.mark.dist
TIMEOUT_S = 1.0


def caught(function):
    """What a rank sees of a collective that cannot end: the error's text and the seconds until it came."""
    began = time.perf_counter()
    try:
        function()
    except CollectiveError as error:
        return str(error), time.perf_counter() - began
    return "nothing", time.perf_counter() - began


def stay_away(mesh):
    """Rank 2 computes for longer than the timeout; the others have said so by then, and rank 2 sees the ruins."""
    barrier(mesh)
    if mesh.rank == 2:
        time.sleep(TIMEOUT_S + 8)
        return "away", 0.0
    return caught(lambda: all_reduce_sum(torch.ones(3), mesh))


def die(mesh):
    barrier(mesh)
    if mesh.rank == 1:
        time.sleep(0.2)
        os._exit(9)
    return caught(lambda: start_all_reduce(torch.ones(3), mesh).wait())


@pytest.fixture
def short_pool():
    """Ranks of their own: after these tests they are of no use to anybody."""
    pools = []

    def make(world_size, timeout_s=TIMEOUT_S):
        pools.append(Pool(world_size, timeout_s=timeout_s))
        pools[-1].timeout_s = 60.0  # of a job, not of a collective
        return pools[-1]

    yield make
    for pool in pools:
        pool.kill()


def test_a_rank_that_stays_away_is_named_within_the_timeout(short_pool, capfd):
    (first, first_s), (second, second_s), _ = short_pool(3).run(stay_away)
    for message, seconds in ((first, first_s), (second, second_s)):
        assert message.startswith("all_reduce_sum of 12 bytes of float32, call 2 over dp (3 ranks) failed")
        assert "rank 2 (at call 1 of dp, outside of any)" in message
        assert TIMEOUT_S < seconds < TIMEOUT_S + 8
    told = capfd.readouterr().err
    assert "has waited 1 s; missing: rank 2 (at call 1 of dp, outside of any)" in told  # before the backend gave up


def run_with_a_death(pool, function, survivors):
    """The survivors' results of a job in which the other ranks die."""
    for pipe in pool.pipes:
        pipe.send((function, (), (Degrees(), False)))
    results = {}
    for rank in survivors:
        assert pool.pipes[rank].poll(30), f"rank {rank} hangs"
        results[rank], failure = pool.pipes[rank].recv()
        assert failure is None, failure
    return results


def test_a_rank_that_dies_ends_the_others_and_is_named(short_pool):
    results = run_with_a_death(short_pool(2, timeout_s=20.0), die, survivors=[0])
    message, seconds = results[0]
    assert "call 2 over dp (2 ranks) failed; missing: rank 1 (no answer: it is dead, or cut off)" in message
    assert seconds < 15  # at once, not after the timeout


def test_ranks_in_different_operations_are_told_from_missing_ones():
    call = Call("all_reduce_sum", "dp", "float32", 4, 16, number=7, started_s=0.0)

    def at(number, inside=None):
        return describe_rank(1, {"numbers": {"dp": number}, "in": inside}, call)

    assert at(7, {"op": "all_reduce_sum", "axis": "dp", "number": 7}) is None and at(9) is None
    assert at(7, {"op": "broadcast", "axis": "dp", "number": 7}) == "rank 1 (in another operation: broadcast)"
    assert at(6) == "rank 1 (at call 6 of dp, outside of any)"
    elsewhere = {"op": "all_gather", "axis": "tp", "number": 3}
    assert at(6, elsewhere) == "rank 1 (at call 6 of dp, in all_gather over tp, call 3)"
    assert describe_rank(1, None, call) == "rank 1 (no answer: it is dead, or cut off)"


def calls_in_flight(mesh):
    handle = start_all_reduce(torch.ones(4), mesh)
    time.sleep(0.5)
    over = mesh.log.in_flight[-1].is_over
    handle.wait()
    return over


def test_a_transfer_that_is_over_but_not_yet_waited_for_is_not_late(short_pool):
    assert short_pool(2, timeout_s=30.0).run(calls_in_flight) == [True, True]
