"""Well-known plans send the bytes of their papers' formulas, and the solver's plan in the same setting costs no more."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.known_plans import formulas
from bench.known_plans.__main__ import main
from bench.known_plans.compare import compared, traffic
from bench.known_plans.formulas import Sizes, Term
from bench.known_plans.settings import SETTINGS, WIDE

QUICK = ("megatron_by_bytes", "sequence", "vocabulary", "sharded_by_bytes", "hybrid", "sharded_again", "ulysses")
SIZES = Sizes(WIDE, batch=2, length=1024)
TOKENS, WIDTH, LAYERS = 2048, 4096, 2 * 218_103_808


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SETTINGS])
def test_a_known_plan_sends_its_formula_and_the_solvers_plan_costs_no_more(name: str) -> None:
    result = compared(SETTINGS[name]())
    assert traffic(result.known) == result.formula
    assert result.no_worse
    assert result.found.gap < (1e-6 if result.setting.memory_limit is None else 5e-3), "a binding memory limit may leave a gap"


def sent(terms: tuple[Term, ...], *kinds: str) -> int:
    return sum(t.bytes for t in terms if t.paper and t.kind in kinds)


def test_megatron_and_sequence_parallelism_send_the_same() -> None:
    """8 (t-1)/t T H e bytes per layer; sequence parallelism adds embedding and head."""
    stream = 7 * TOKENS * WIDTH * 2 // 8
    assert sent(formulas.megatron(SIZES, "tp", 8), "all_reduce") == 2 * 8 * stream
    cut = formulas.sequence_parallel(SIZES, "tp", 8)
    assert sent(cut, "all_gather") == sent(cut, "reduce_scatter") == (2 * 4 + 2) * stream


def test_bytes_of_data_parallelism_and_of_fully_sharded_data_parallelism() -> None:
    """The matrices of a Llama 3 8B layer have 218,103,808 weights."""
    weights = 2 * (LAYERS + 2 * 128_256 * WIDTH)
    assert sum(SIZES.matrices) == WIDTH**2 * 5 // 2 + 3 * WIDTH * 14336 == 218_103_808
    norms = [t.bytes for t in formulas.data_parallel(SIZES, "dp", 8) if t.what == "gradients of norms"]
    assert norms == [5 * 2 * 7 * WIDTH * 2 // 8]
    assert sent(formulas.data_parallel(SIZES, "dp", 8), "all_reduce") == 2 * 7 * weights // 8
    for gathers in (1, 2):
        terms = formulas.fully_sharded(SIZES, "dp", 8, gathers)
        assert sent(terms, "all_gather") == 7 * (weights + (gathers - 1) * 2 * (LAYERS + 128_256 * WIDTH)) // 8
        assert sent(terms, "reduce_scatter") == 7 * weights // 8


def test_hybrid_and_combined_plans_add_what_their_axes_send() -> None:
    weights = 2 * (LAYERS + 2 * 128_256 * WIDTH)
    hybrid = formulas.hybrid(SIZES, "fsdp", 8, "dp", 4, 2)
    assert sent(hybrid, "all_reduce") == 2 * 3 * (weights // 8) // 4
    both = formulas.sharded_and_tensor_parallel(SIZES, "dp", 2, "tp", 8, 2)
    assert sent(tuple(t for t in both if t.axis == "dp"), "all_gather", "reduce_scatter") == (3 * weights - 2 * 128_256 * WIDTH) // 8 // 2
    inner = sent(tuple(t for t in both if t.axis == "tp"), "all_gather", "reduce_scatter")
    assert inner == (2 * 8 + 4) * 7 * (TOKENS // 2) * WIDTH * 2 // 8


def test_ulysses_sends_q_k_v_and_the_result() -> None:
    """(c-1)/c T (2 H + 2 H_kv) e bytes, in the forward and in the backward; T is the tokens of a rank."""
    assert sent(formulas.ulysses(SIZES, "cp", 8), "all_to_all") == 2 * 2 * 7 * (TOKENS // 8) * 2 * (WIDTH + 1024) * 2 // 8


def test_the_bench_prints_a_difference_from_the_formula(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    setting = SETTINGS["vocabulary"]()
    monkeypatch.setitem(SETTINGS, "vocabulary", lambda: setting)
    assert main(["vocabulary", "--details"]) == 0
    assert "statistics of the loss" in capsys.readouterr().out
    monkeypatch.setitem(SETTINGS, "vocabulary", lambda: replace(setting, terms=setting.terms[:1]))
    assert main(["vocabulary"]) == 1
    assert "the formula says" in capsys.readouterr().out
