"""Agreement among ranks, which are threads over one HashStore, and checksums. test_launch_processes.py has real processes."""

from __future__ import annotations

import dataclasses
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxshard._torch_compat.fakes import FakeTensorMode
from fxshard.errors import ConstraintError, OptionError, RunError
from fxshard.plans.plan_data import PlannedNode
from fxshard.plans.sharding_plan import ShardingPlan
from fxshard.runtime.ranks import agreement
from fxshard.runtime.ranks.agreement import Group, Meeting, default_group, name_ranks
from fxshard.runtime.ranks.launch import agreed, checksum, compare, difference, objection, share_plan
from tests.plans.small_plans import small_plan

SLOW = 30.0  # seconds that no test may take, even on a busy machine


def run_ranks(
    ranks: tuple[int, ...], body: Callable[[Group], Any], store: Any = None, come: tuple[int, ...] | None = None
) -> dict[int, Any]:
    """Runs ``body`` on a thread for each of ``come`` (default: all ``ranks``). Returns results or exceptions by rank."""
    store = store or dist.HashStore()
    come = ranks if come is None else come

    def one(rank: int) -> Any:
        try:
            return body(Group(store, rank, ranks))
        except BaseException as error:
            return error

    started = time.monotonic()
    with ThreadPoolExecutor(len(come)) as pool:
        found = dict(zip(come, pool.map(one, come), strict=True))
    assert time.monotonic() - started < SLOW
    return found


def large_plan() -> ShardingPlan:
    """A plan whose JSON does not compress into one piece of 4 KiB."""
    small = small_plan()
    matmul = small.nodes[2]
    extra = tuple(PlannedNode(f"n{checksum(torch.tensor(i))}", matmul.op, matmul.spec, matmul.shapes, matmul.dtypes) for i in range(2000))
    return dataclasses.replace(small, nodes=(*small.nodes, *extra))


def unplanned() -> ShardingPlan:
    raise AssertionError("this rank must not plan")


def keys_left(store: Any) -> list[str]:
    return [key for key in store.list_keys() if "/uses/" not in key]


def test_the_plan_is_the_same_byte_for_byte_and_no_key_stays() -> None:
    store = dist.HashStore()
    for plan in (small_plan(), large_plan()):
        found = run_ranks((0, 1, 2), lambda g, p=plan: share_plan((lambda: p) if g.rank == 0 else unplanned, group=g, timeout=SLOW), store)
        assert {r: p.to_json() for r, p in found.items()} == dict.fromkeys((0, 1, 2), plan.to_json())
    assert keys_left(store) == []


def test_a_large_plan_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PIECE", 4096)
    plan, store = large_plan(), dist.HashStore()
    found = run_ranks((3, 5), lambda g: share_plan((lambda: plan) if g.rank == 3 else unplanned, group=g, timeout=SLOW), store)
    assert len(zlib.compress(plan.to_json().encode())) > 3 * 4096
    assert found[5] == plan
    assert keys_left(store) == []


def test_a_failure_to_plan_reaches_all_at_once_and_the_planner_keeps_its_own_error() -> None:
    def fail() -> ShardingPlan:
        raise ConstraintError("the pin 'wq' matches nothing", where="pins", remedy="name a parameter")

    found = run_ranks((0, 1, 2), lambda g: share_plan(fail, group=g, timeout=600.0))
    assert isinstance(found[0], ConstraintError)
    for rank in (1, 2):
        assert type(found[rank]) is RunError
        assert found[rank].what == "rank 0 could not plan: ConstraintError: the pin 'wq' matches nothing"
        assert (found[rank].where, found[rank].remedy) == ("pins", "name a parameter (rank 0 has the whole error)")


def test_of_a_long_error_the_other_ranks_get_the_first_lines() -> None:
    def fail(error: Exception) -> ShardingPlan:
        raise error

    long = ConstraintError("nothing fits", where="mesh tp=2; most of it in\n    tensor  bytes\n    x  1 GB")
    found = run_ranks((0, 1), lambda g: share_plan(lambda: fail(long), group=g, timeout=600.0))
    assert found[0] is long
    said = (
        "rank 0 could not plan: ConstraintError: nothing fits\n  where: mesh tp=2; most of it in ...\n  to do: rank 0 has the whole error"
    )
    assert str(found[1]) == said
    found = run_ranks((0, 1), lambda g: share_plan(lambda: fail(ValueError("first\nsecond")), group=g, timeout=600.0))
    assert found[1].what == "rank 0 could not plan: ValueError: first ..."
    assert found[1].remedy == "see the output of rank 0, which has the whole error and its traceback"


def test_a_rank_that_fails_where_another_plans_is_not_said_to_plan() -> None:
    failed = threading.Event()

    def body(group: Group) -> None:
        try:
            with Meeting(group, "share the plan", timeout=600.0, work="plan") as meeting:
                if group.rank == 1:
                    raise KeyboardInterrupt
                failed.wait(SLOW)
                meeting.everyone()
        finally:
            failed.set()

    found = run_ranks((0, 1), body)
    assert found[0].what == "rank 1 could not share the plan: KeyboardInterrupt"


def test_a_failure_to_plan_does_not_wait_for_ranks_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> ShardingPlan:
        raise ZeroDivisionError

    found = run_ranks((0, 1, 2), lambda g: share_plan(fail, group=g, timeout=600.0), come=(0, 1))
    assert isinstance(found[0], ZeroDivisionError)
    assert "rank 0 could not plan: ZeroDivisionError" in str(found[1])


@pytest.mark.parametrize(("come", "missing"), [((0, 2), "rank 1"), ((0,), "ranks 1-2"), ((1, 2), "rank 0"), ((1,), "ranks 0, 2")])
def test_missing_ranks_are_named_on_all_ranks(come: tuple[int, ...], missing: str) -> None:
    found = run_ranks((0, 1, 2), lambda g: share_plan(small_plan, group=g, timeout=0.6), come=come)
    assert len({str(error) for error in found.values()}) == 1
    assert f"{missing} did not come to share the plan within 0.6 s; there: {name_ranks(come)}" in str(found[come[0]])


def test_a_late_rank_learns_that_the_others_have_given_up() -> None:
    store = dist.HashStore()
    run_ranks((0, 1), lambda g: compare({}, group=g, timeout=0.1), store, come=(0,))
    late = run_ranks((0, 1), lambda g: compare({}, group=g, timeout=600.0), store, come=(1,))[1]
    assert "rank 1 did not come to compare what they run within 0.1 s; there: rank 0" in str(late)
    assert run_ranks((0, 1), lambda g: compare({}, group=g, timeout=SLOW), store) == {0: None, 1: None}


def test_a_planner_that_takes_too_long_is_named_and_its_plan_is_dropped_everywhere() -> None:
    given_up = threading.Event()

    def plan() -> ShardingPlan:
        given_up.wait(SLOW)
        return small_plan()

    def body(group: Group) -> ShardingPlan:
        try:
            return share_plan(plan, group=group, timeout=0.6)
        finally:
            given_up.set()

    found = run_ranks((0, 1), body)
    assert "rank 0 did not share the plan within 0.6 s; all ranks are there" in str(found[1])
    assert str(found[0]) == str(found[1])


def test_ranks_at_different_calls_get_an_error() -> None:
    def body(group: Group) -> Any:
        return compare({}, group=group, timeout=SLOW) if group.rank == 2 else share_plan(small_plan, group=group, timeout=SLOW, key="abc")

    found = run_ranks((0, 1, 2), body)
    assert all("ranks 0-1 to share the plan (abc); rank 2 to compare what they run" in str(error) for error in found.values())


def test_a_rank_that_fails_in_a_meeting_tells_the_others() -> None:
    def body(group: Group) -> None:
        with Meeting(group, "meet", timeout=600.0) as meeting:
            if group.rank == 1:
                raise KeyboardInterrupt
            meeting.everyone() if meeting.leads else meeting.outcome()

    found = run_ranks((0, 1, 2), body)
    assert isinstance(found[1], KeyboardInterrupt)
    assert found[0].what == found[2].what == "rank 1 could not meet: KeyboardInterrupt"


def test_a_rank_that_ends_while_it_settles_does_not_hang_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "GRACE", 0.2)
    store = dist.HashStore()
    store.add("fxshard/0,1/1/decided", 1)
    found = run_ranks((0, 1), lambda g: compare({}, group=g, timeout=0.2), store)
    assert all("a rank ended while it wrote the outcome" in str(error) for error in found.values())


def test_groups_do_not_disturb_each_other() -> None:
    store = dist.HashStore()

    def pair(ranks: tuple[int, ...]) -> dict[int, Any]:
        return run_ranks(ranks, lambda g: [compare({"plan": str(ranks)}, group=g, timeout=SLOW) for _ in range(5)], store)

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(pair, [(0, 1), (2, 3), (4, 5, 6)]):
            assert all(value == [None] * 5 for value in found.values()), found
    assert keys_left(store) == []


def test_a_lost_store_is_an_error_that_says_so() -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise dist.DistNetworkError("Broken pipe")

    with pytest.raises(RunError, match="rank 1 lost the process group's store when it was about to compare what they run: Broken pipe"):
        compare({}, group=Group(Gone(), 1, (0, 1)), timeout=SLOW)


@pytest.mark.parametrize("kind", ["file", "prefix", "tcp"])
def test_every_kind_of_store(kind: str, tmp_path: Path) -> None:
    def store() -> Any:
        return dist.FileStore(str(tmp_path / "store"), 2)

    if kind == "prefix":
        shared = dist.PrefixStore("default_pg", dist.HashStore())
    elif kind == "tcp":
        shared = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    plan = small_plan()

    def body(group: Group) -> ShardingPlan:
        group = dataclasses.replace(group, store=store()) if kind == "file" else group
        compare({"plan": "a"}, group=group, timeout=SLOW)
        return share_plan(lambda: plan, group=group, timeout=SLOW)

    found = run_ranks((0, 1), body, None if kind == "file" else shared)
    assert found == {0: plan, 1: plan}


def test_a_differing_field_is_an_error_on_every_rank() -> None:
    def body(group: Group) -> None:
        compare({"plan": "ab", "value: args[0]": "1" if group.rank in (1, 3) else "2"}, group=group, timeout=SLOW)

    found = run_ranks((0, 1, 2, 3), body)
    assert {str(error) for error in found.values()} == {
        "the ranks differ in the value of args[0]: ranks 0, 2: 2; ranks 1, 3: 1\n"
        "  where: before the first collective of ranks 0-3\n"
        "  to do: plain tensors are global values, the same on each rank; "
        "pass a rank's own batch with fxshard.local_batch(x, device_mesh, axis=...), with the axis over which batches are split"
    }


def test_ranks_agree_on_a_text_and_one_objection_counts_for_all() -> None:
    ranks = (0, 1, 2)
    same = run_ranks(ranks, lambda group: agreed("s > 1", "agree", group=group, timeout=SLOW))
    differ = run_ranks(ranks, lambda group: agreed(f"s > {group.rank // 2}", "agree", group=group, timeout=SLOW))
    assert set(same.values()) == {True} and set(differ.values()) == {False}
    none = run_ranks(ranks, lambda group: objection(None, group=group, timeout=SLOW))
    one = run_ranks(ranks, lambda group: objection("s is 1" if group.rank == 2 else None, group=group, timeout=SLOW))
    assert set(none.values()) == {None} and set(one.values()) == {"s is 1"}


def test_the_cause_comes_before_its_consequences() -> None:
    error = difference({0: {"program": "p", "plan": "a", "torch": "2.13.0"}, 1: {"program": "q", "plan": "b", "torch": "2.13.1"}})
    assert error is not None
    assert error.what == "the ranks differ in torch: rank 0: 2.13.0; rank 1: 2.13.1 (and in plan, program)"
    assert error.remedy == "install the same version of torch on all ranks"


def test_of_many_differences_a_few_are_named() -> None:
    error = difference({rank: {f"weights: layers.{i}": f"{rank}" for i in range(9)} for rank in (0, 1)})
    assert error is not None
    few = ", ".join(f"the weights of layers.{i}" for i in range(1, 5))
    assert error.what == f"the ranks differ in the weights of layers.0: rank 0: 0; rank 1: 1 (and in {few} and 4 others)"


def test_fields_that_some_ranks_lack_and_unknown_ones() -> None:
    error = difference({0: {"colour": "red"}, 1: {}, 2: {"colour": "red"}})
    assert error is not None
    assert error.what == "the ranks differ in colour: ranks 0, 2: red; rank 1: (none)"
    assert error.remedy == "make it the same on all ranks"
    assert difference({0: {"a": "1"}, 1: {"a": "1"}}) is None


def test_long_values_are_cut_to_where_they_differ_and_many_are_counted() -> None:
    error = difference({rank: {"shape": "x" * 500 + f"[{rank}]" + "y" * 500} for rank in range(7)})
    assert error is not None
    assert "...xxxxxxxxx[0]yyy" in error.what and error.what.endswith("...; and 3 other values")
    assert len(error.what) < 400


def test_ranks_are_named_in_spans() -> None:
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([5, 0, 1, 2]) == "ranks 0-2, 5"
    assert name_ranks([7, 3]) == "ranks 3, 7"


def test_one_rank_exchanges_nothing() -> None:
    assert default_group() is None
    assert share_plan(small_plan) == small_plan()
    compare({"plan": "a"})
    assert agreed("s > 1", "agree") and objection("s is 1") == "s is 1"


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_tell_values_apart_and_nothing_else(dtype: torch.dtype) -> None:
    x = (torch.arange(24).reshape(4, 6) % 2).to(dtype)
    assert checksum(x) == checksum(x.clone()) == checksum(x.t().contiguous().t())
    strided = torch.zeros(4, 12).to(dtype)[:, ::2]
    strided.copy_(x)
    assert checksum(strided) == checksum(x)
    other = x.clone()
    other[3, 5] = 0
    assert checksum(other) != checksum(x)


def test_checksums_of_shapes_and_special_tensors() -> None:
    x = torch.arange(6.0)
    assert checksum(x) != checksum(x.reshape(2, 3)) != checksum(x.reshape(3, 2))
    assert checksum(x) != checksum(x.double())
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0)) != checksum(torch.tensor([0.0]))
    assert checksum(torch.empty(0, 3)) == checksum(torch.empty(0, 3)) != checksum(torch.empty(3, 0))
    assert checksum(torch.nn.Parameter(x)) == checksum(x)
    assert x.untyped_storage().resizable()
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert checksum(z.conj()) == checksum(z.conj().resolve_conj()) != checksum(z)
    assert checksum(z.conj().imag) == checksum(torch.tensor([-2.0, 1.0]))


def test_checksums_of_tensors_without_values() -> None:
    meta = torch.empty(1 << 20, 1 << 20, device="meta")
    with FakeTensorMode():
        fake = torch.empty(1 << 20, 1 << 20)
    assert checksum(meta) == checksum(fake) != checksum(meta.t()[1:])
    with pytest.raises(OptionError, match=r"layout torch\.sparse_coo has no checksum"):
        checksum(torch.eye(2).to_sparse())
