"""Exact formulas for the bytes that a rank sends in one training step under well-known plans, including what the papers do not count.

Collectives are rings throughout. Sources: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053: four all-reduces a layer, the vocabulary in
parallel); sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198: each all-reduce becomes a reduce-scatter and an all-gather);
data parallelism (Li et al. 2020, arXiv:2006.15704); ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054) and FSDP with hybrid
sharding (Zhao et al. 2023, arXiv:2304.11277); Ulysses (Jacobs et al. 2023, arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from examples.llama import LlamaConfig

NUMBER = 4
"""Bytes of a float32, the dtype of the loss's statistics."""


@dataclass(frozen=True)
class Term:
    """``count`` collectives of one ``kind`` on ``axis``, in which each rank sends ``bytes`` in total; ``paper``: whether the papers count
    them."""

    what: str
    kind: str
    axis: str
    count: int
    bytes: int
    paper: bool = True


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama's step: its config, the number of sequences, their length, and the bytes of an element (weights, gradients,
    activations)."""

    config: LlamaConfig
    batch: int
    length: int
    element: int = 2

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def kv(self) -> int:
        return self.config.kv_heads * self.config.head_dim

    @property
    def matrices(self) -> tuple[int, ...]:
        """Elements of each matrix of a layer: H^2 (2 + 2 h_kv/h) + 3 H F together."""
        c = self.config
        return (c.dim**2, self.kv * c.dim, self.kv * c.dim, c.dim**2, *(c.dim * c.ffn,) * 3)

    @property
    def norms(self) -> int:
        """The number of norms' weights, each of H elements."""
        return 2 * self.config.layers + 1

    @property
    def tables(self) -> int:
        """Elements of the embedding; the head has as many."""
        return self.config.vocab * self.config.dim


def term(what: str, kind: str, axis: str, n: int, buffer: int, count: int = 1, paper: bool = True) -> Term:
    """``count`` collectives on ``n`` ranks. ``buffer``, in bytes, is the whole tensor that is reduced, gathered or scattered; for an
    all-to-all it is one rank's part."""
    sent = Fraction((2 if kind == "all_reduce" else 1) * (n - 1) * buffer, n)
    return Term(what, kind, axis, count, count * -(-sent.numerator // sent.denominator), paper)


def megatron(s: Sizes, axis: str, t: int) -> tuple[Term, ...]:
    """4 all-reduces of T H per layer: of the results of attention and feed-forward, and of the gradients of their inputs."""
    stream = s.tokens * s.config.dim * s.element
    return (term("sums of the residual stream", "all_reduce", axis, t, stream, 4 * s.config.layers),)


def vocabulary(s: Sizes, axis: str, t: int) -> tuple[Term, ...]:
    """Embedding, head and loss sharded by the vocabulary: two all-reduces of T H, and those of the loss, with one number per token."""
    stream = s.tokens * s.config.dim * s.element
    return (
        term("rows looked up", "all_reduce", axis, t, stream),
        term("gradient of the head's input", "all_reduce", axis, t, stream),
        *loss_by_vocabulary(s.tokens, axis, t),
    )


def loss_by_vocabulary(tokens: int, axis: str, t: int) -> tuple[Term, ...]:
    """Three all-reduces of one number per token in the forward (maximum, sum of exponentials, the target's score), none in the backward."""
    return (term("statistics of the loss", "all_reduce", axis, t, tokens * NUMBER, 3),)


def sequence_parallel(s: Sizes, axis: str, t: int, groups: int = 1) -> tuple[Term, ...]:
    """Each of Megatron's all-reduces becomes a reduce-scatter, and an all-gather before the next product; norms work on shards of the
    sequence.

    ``groups``: the number of groups of ranks that divide the tokens among them.
    """
    tokens, layers = s.tokens // groups, s.config.layers
    stream = tokens * s.config.dim * s.element
    return (
        term("gathers of the residual stream", "all_gather", axis, t, stream, 4 * layers),
        term("scattered sums of the residual stream", "reduce_scatter", axis, t, stream, 4 * layers),
        term("rows looked up, scattered", "reduce_scatter", axis, t, stream),
        term("gradient of them, gathered", "all_gather", axis, t, stream),
        term("the head's input, gathered", "all_gather", axis, t, stream),
        term("gradient of it, scattered", "reduce_scatter", axis, t, stream),
        *loss_by_vocabulary(tokens, axis, t),
        term("gradients of the norms' weights", "all_reduce", axis, t, s.config.dim * s.element, s.norms, paper=False),
    )


def _weights(s: Sizes, what: str, kind: str, axis: str, n: int, parts: int = 1) -> Iterator[Term]:
    """One collective per parameter, or per 1/``parts`` of it if another axis shards it already."""
    yield from _matrices(s, what, kind, axis, n, parts)
    yield from _norms(s, what, kind, axis, n, parts)


def _matrices(s: Sizes, what: str, kind: str, axis: str, n: int, parts: int = 1) -> Iterator[Term]:
    yield _of_layers(s, what, kind, axis, n, parts)
    yield term(f"{what} of embedding and head", kind, axis, n, s.tables * s.element // parts, 2)


def _of_layers(s: Sizes, what: str, kind: str, axis: str, n: int, parts: int) -> Term:
    each = [term("", kind, axis, n, size * s.element // parts, s.config.layers) for size in s.matrices]
    return Term(f"{what} of matrices", kind, axis, sum(t.count for t in each), sum(t.bytes for t in each))


def _again(s: Sizes, axis: str, d: int, parts: int, gathers: int) -> tuple[Term, ...]:
    """The gathers after the first one: none for the embedding, whose backward does not read the table, nor for norms, which are small."""
    head = term("head again", "all_gather", axis, d, s.tables * s.element // parts)
    return (_of_layers(s, "weights again", "all_gather", axis, d, parts), head) * (gathers - 1)


def _norms(s: Sizes, what: str, kind: str, axis: str, n: int, parts: int = 1) -> Iterator[Term]:
    yield term(f"{what} of norms", kind, axis, n, s.config.dim * s.element // parts, s.norms, paper=False)


def mean_loss(axes: Iterable[tuple[str, int]]) -> tuple[Term, ...]:
    """All-reduces of the sum of the tokens' losses and of the sum of their weights, on each axis that shards the tokens."""
    return tuple(term("sums of losses and weights", "all_reduce", axis, n, NUMBER, 2, paper=False) for axis, n in axes)


def data_parallel(s: Sizes, axis: str, d: int) -> tuple[Term, ...]:
    """One all-reduce per gradient."""
    return (*_weights(s, "gradients", "all_reduce", axis, d), *mean_loss([(axis, d)]))


def fully_sharded(s: Sizes, axis: str, d: int, gathers: int) -> tuple[Term, ...]:
    """Each weight is gathered for the forward, and a matrix again for the backward if ``gathers`` is 2; its gradient is
    reduce-scattered."""
    return (
        *_weights(s, "weights", "all_gather", axis, d),
        *_again(s, axis, d, 1, gathers),
        *_weights(s, "gradients", "reduce_scatter", axis, d),
        *mean_loss([(axis, d)]),
    )


def hybrid(s: Sizes, axis: str, d: int, outer: str, r: int, gathers: int) -> tuple[Term, ...]:
    """Fully sharded on ``axis``; the gradients of the shards are all-reduced over the replicas on ``outer``."""
    return (*fully_sharded(s, axis, d, gathers), *_weights(s, "gradients", "all_reduce", outer, r, d), *mean_loss([(outer, r)]))


def sharded_and_tensor_parallel(s: Sizes, axis: str, d: int, inner: str, t: int, gathers: int) -> tuple[Term, ...]:
    """Blocks are tensor and sequence parallel on ``inner``, which has ``t`` ranks; the shards of matrices are fully sharded on ``axis``;
    norms are replicated."""
    matrices = (
        *_matrices(s, "weights", "all_gather", axis, d, t),
        *_again(s, axis, d, t, gathers),
        *_matrices(s, "gradients", "reduce_scatter", axis, d, t),
    )
    return (*matrices, *_norms(s, "gradients", "all_reduce", axis, d), *mean_loss([(axis, d)]), *sequence_parallel(s, inner, t, d))


def ulysses(s: Sizes, axis: str, c: int) -> tuple[Term, ...]:
    """q, k and v go from shards of the sequence to shards of the heads, and the result of attention goes back; likewise their gradients."""
    tokens = s.tokens // c * s.element
    return (
        term("q and the result of attention, and their gradients", "all_to_all", axis, c, tokens * s.config.dim, 4 * s.config.layers),
        term("k and v, and their gradients", "all_to_all", axis, c, tokens * s.kv, 4 * s.config.layers),
    )
