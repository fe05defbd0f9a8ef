"""Bytes that a rank sends in one training step under the plans that have names, exactly: what the papers count, and what they leave out.

Ring forms throughout. Sources: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053: four all-reduces a layer, the vocabulary in
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
"""Bytes of a float32: statistics of the loss are kept in it."""


@dataclass(frozen=True)
class Term:
    """``count`` collectives of one ``kind`` on ``axis`` in which each rank sends ``bytes`` all told; ``paper``: the papers count them."""

    what: str
    kind: str
    axis: str
    count: int
    bytes: int
    paper: bool = True


@dataclass(frozen=True)
class Sizes:
    """A Llama's step: its config, sequences and their length, bytes of an element of weights, gradients and activations."""

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
        """How many vectors of H elements the norms have."""
        return 2 * self.config.layers + 1

    @property
    def tables(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.config.vocab * self.config.dim


def term(what: str, kind: str, axis: str, n: int, buffer: int, count: int = 1, paper: bool = True) -> Term:
    """``count`` collectives on ``n`` ranks of a ``buffer`` in bytes: all that is reduced, gathered or scattered, or what a rank has of
    what is exchanged."""
    sent = Fraction((2 if kind == "all_reduce" else 1) * (n - 1) * buffer, n)
    return Term(what, kind, axis, count, count * -(-sent.numerator // sent.denominator), paper)


def megatron(s: Sizes, axis: str, t: int) -> tuple[Term, ...]:
    """4 all-reduces of T H a layer: after attention and feed-forward, and of the gradients of what went into them."""
    stream = s.tokens * s.config.dim * s.element
    return (term("sums of the residual stream", "all_reduce", axis, t, stream, 4 * s.config.layers),)


def vocabulary(s: Sizes, axis: str, t: int) -> tuple[Term, ...]:
    """Embedding, head and loss cut by the vocabulary: two sums of T H, and the loss's of a number a token."""
    stream = s.tokens * s.config.dim * s.element
    return (
        term("rows looked up", "all_reduce", axis, t, stream),
        term("gradient of the head's input", "all_reduce", axis, t, stream),
        *loss_by_vocabulary(s.tokens, axis, t),
    )


def loss_by_vocabulary(tokens: int, axis: str, t: int) -> tuple[Term, ...]:
    """Maximum, sum of exponentials and the target's score of each token in the forward, nothing in the backward."""
    return (term("statistics of the loss", "all_reduce", axis, t, tokens * NUMBER, 3),)


def sequence_parallel(s: Sizes, axis: str, t: int, groups: int = 1) -> tuple[Term, ...]:
    """Each of Megatron's all-reduces is a reduce-scatter, and an all-gather before the next product; norms see a part of the sequence.

    ``groups``: of ranks that share the tokens.
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
    """One collective a parameter, of which the ranks of a group have a ``parts``-th together."""
    yield from _matrices(s, what, kind, axis, n, parts)
    yield from _norms(s, what, kind, axis, n, parts)


def _matrices(s: Sizes, what: str, kind: str, axis: str, n: int, parts: int = 1) -> Iterator[Term]:
    yield _of_layers(s, what, kind, axis, n, parts)
    yield term(f"{what} of embedding and head", kind, axis, n, s.tables * s.element // parts, 2)


def _of_layers(s: Sizes, what: str, kind: str, axis: str, n: int, parts: int) -> Term:
    each = [term("", kind, axis, n, size * s.element // parts, s.config.layers) for size in s.matrices]
    return Term(f"{what} of matrices", kind, axis, sum(t.count for t in each), sum(t.bytes for t in each))


def _again(s: Sizes, axis: str, d: int, parts: int, gathers: int) -> tuple[Term, ...]:
    """What is gathered beyond the first time: not the embedding, whose backward reads no table, and no norms, which are small."""
    head = term("head again", "all_gather", axis, d, s.tables * s.element // parts)
    return (_of_layers(s, "weights again", "all_gather", axis, d, parts), head) * (gathers - 1)


def _norms(s: Sizes, what: str, kind: str, axis: str, n: int, parts: int = 1) -> Iterator[Term]:
    yield term(f"{what} of norms", kind, axis, n, s.config.dim * s.element // parts, s.norms, paper=False)


def mean_loss(axes: Iterable[tuple[str, int]]) -> tuple[Term, ...]:
    """The sum of the tokens' losses and that of their weights, where tokens are cut."""
    return tuple(term("sums of losses and weights", "all_reduce", axis, n, NUMBER, 2, paper=False) for axis, n in axes)


def data_parallel(s: Sizes, axis: str, d: int) -> tuple[Term, ...]:
    """Each gradient is summed once."""
    return (*_weights(s, "gradients", "all_reduce", axis, d), *mean_loss([(axis, d)]))


def fully_sharded(s: Sizes, axis: str, d: int, gathers: int) -> tuple[Term, ...]:
    """Each weight is gathered for the forward, matrices again for the backward where ``gathers`` is 2; its gradient is summed and
    scattered."""
    return (
        *_weights(s, "weights", "all_gather", axis, d),
        *_again(s, axis, d, 1, gathers),
        *_weights(s, "gradients", "reduce_scatter", axis, d),
        *mean_loss([(axis, d)]),
    )


def hybrid(s: Sizes, axis: str, d: int, outer: str, r: int, gathers: int) -> tuple[Term, ...]:
    """Fully sharded on ``axis``, and the sums of a shard's gradients over the replicas on ``outer``."""
    return (*fully_sharded(s, axis, d, gathers), *_weights(s, "gradients", "all_reduce", outer, r, d), *mean_loss([(outer, r)]))


def sharded_and_tensor_parallel(s: Sizes, axis: str, d: int, inner: str, t: int, gathers: int) -> tuple[Term, ...]:
    """Matrices cut by ``t`` are fully sharded on ``axis``, norms are whole; blocks are tensor and sequence parallel on ``inner``."""
    matrices = (
        *_matrices(s, "weights", "all_gather", axis, d, t),
        *_again(s, axis, d, t, gathers),
        *_matrices(s, "gradients", "reduce_scatter", axis, d, t),
    )
    return (*matrices, *_norms(s, "gradients", "all_reduce", axis, d), *mean_loss([(axis, d)]), *sequence_parallel(s, inner, t, d))


def ulysses(s: Sizes, axis: str, c: int) -> tuple[Term, ...]:
    """q, k, v and what attention gives change from a part of the sequence to a part of the heads or back; likewise their gradients."""
    tokens = s.tokens // c * s.element
    return (
        term("q and the attended, and their gradients", "all_to_all", axis, c, tokens * s.config.dim, 4 * s.config.layers),
        term("k and v, and their gradients", "all_to_all", axis, c, tokens * s.kv, 4 * s.config.layers),
    )
