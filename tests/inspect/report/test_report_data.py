"""The data of a report: edges and halves as in the graph, costs and memory that add up to the plan's, alternatives as explained."""

from __future__ import annotations

import math

import pytest

from fxshard.graph.planning_graph import operands, planned_nodes, producer
from fxshard.inspect.report import Parts, costliest, report_data
from fxshard.plans.sharding_plan import ShardingPlan
from tests.inspect.report.example_reports import llama_plan, parts_of, small_plan


@pytest.fixture(scope="module")
def data() -> dict:
    return report_data(llama_plan(), parts_of(llama_plan()))


def test_edges_are_those_of_the_graph(data: dict) -> None:
    nodes = data["graph"]["nodes"]
    names = [node[0] for node in nodes]
    for node in planned_nodes(llama_plan().origin.annotated.graph):
        read = [(names[made], output) for made, output, _ in nodes[names.index(node.name)][7]]
        assert read == [(source.name, output) for source, output in map(producer, operands(node))]
    assert any(output for node in nodes for _, output, _ in node[7])


def test_halves_and_modules(data: dict) -> None:
    graph = data["graph"]
    found = {node[0]: (graph["modules"][node[4]], bool(node[5])) for node in graph["nodes"]}
    assert found["sdpa"] == ("layers.0.attention", False) and found["sdpa_backward"] == ("layers.1.attention", True)
    assert found["layers_0_attention_wq_weight"] == ("layers.0.attention.wq", False)
    assert found["embedding_dense_backward"][1] and not found["output"][1]
    sums = [name for name, (module, backward) in found.items() if backward and name.startswith("add") and not module]
    assert not sums  # a sum of gradients lies in a module, though tracing gives it none


def test_costs_add_up(data: dict) -> None:
    plan = llama_plan()
    assert math.isclose(sum(cost for _, cost, _ in data["split"]), plan.objective, rel_tol=1e-4)
    assert sum(row[3] for row in data["traffic"]) == sum(c.bytes for c in plan.collectives)
    sent = sum(step[2] for move in data["graph"]["redistributions"] for step in move[4])
    assert sent == sum(c.bytes for c in plan.collectives if c.entry < len(plan.redistributions))


def test_memory_is_the_plans(data: dict) -> None:
    """The page adds up the lives of tensors; at the peak that is the plan's memory by kind."""
    profile, peak = data["profile"], data["profile"]["peak_step"]
    kinds = dict(profile["static"])
    for _, kind, size, birth, death, _ in profile["tensors"]:
        if birth <= peak <= death:
            kinds[profile["kinds"][kind]] = kinds.get(profile["kinds"][kind], 0) + size
    kinds["temporary"] = kinds.get("temporary", 0) + dict(map(tuple, profile["workspace"])).get(peak, 0)
    assert {kind: size for kind, size in kinds.items() if size} == {kind: size for kind, size in llama_plan().memory.items() if size}
    assert sum(kinds.values()) == profile["peak"]


def test_the_timeline_has_a_lane_for_each_axis(data: dict) -> None:
    timeline = data["timeline"]
    assert timeline["lanes"] == ["compute", "dp", "tp"]
    busy = [sum(event[4] for event in timeline["events"] if event[2] == lane) for lane in range(3)]
    assert math.isclose(busy[0], timeline["computing"], rel_tol=1e-3)
    assert math.isclose(busy[1] + busy[2], timeline["communicating"], rel_tol=1e-3)
    assert all(event[6] >= 0 for event in timeline["events"] if event[2])  # each collective names the value that it moves


def test_alternatives_are_those_explained() -> None:
    plan = small_plan()
    answer = plan.explain("0.weight")
    [said] = report_data(plan, Parts(answers=(answer,)))["answers"]
    assert [choice["layout"] for choice in said["choices"]] == [choice.layout for choice in answer.choices]
    for choice, known in zip(said["choices"], answer.choices, strict=True):
        if known.total is None:
            assert choice["reason"] == known.reason
        else:
            assert math.isclose(choice["more"], known.total - answer.total, rel_tol=1e-4, abs_tol=1e-6)


def test_the_costliest_values_are_asked_about_once() -> None:
    names = costliest(llama_plan(), 5)
    assert len(set(names)) == 5 and not any(name.startswith("layers.1.") for name in names)
    assert costliest(small_plan(), 0) == []


def test_a_plan_from_a_file_keeps_its_graph_and_says_what_is_missing() -> None:
    plan = ShardingPlan.from_json(small_plan().to_json())
    made, read = report_data(small_plan(), Parts()), report_data(plan, Parts(missing={"timeline": "why"}))
    assert read["graph"] == made["graph"] and read["graph"]["edges"]
    assert read["timeline"] is None and read["profile"] is None and read["missing"] == {"timeline": "why"}
