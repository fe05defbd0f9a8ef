"""What kernels and NCCL reach on a generation of GPUs, as a fraction of the data sheet or in microseconds; each number with its source.

Numbers without the word *fitted* are published ones. The fitted ones, and how well they hold on measurements left out, are in
docs/hardware.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROTOCOLS = ("LL", "LL128", "Simple")
"""NCCL's protocols: low latency with a flag beside every 4 bytes, with a flag in every 128, and plain buffers."""


@dataclass(frozen=True)
class Latencies:
    """Microseconds by protocol (LL, LL128, Simple): of the start (``base``), of a hop inside a node and of one between nodes."""

    base: tuple[float, float, float]
    inside: tuple[float, float, float]
    between: tuple[float, float, float]


# NCCL 2.28, src/graph/tuning.cc, ncclTunerConstantsDefaults: baseLatencies and hwLatencies of NVLINK and NET.
RING = Latencies((6.6, 14.0, 8.4), (0.6, 1.9, 3.4), (2.7, 4.0, 14.0))
TREE = Latencies((6.8, 14.0, 8.4), (0.6, 1.25, 4.0), (5.0, 8.5, 14.0))
NVLS_INSIDE = 25.0
RING_LL128, TREE_LL128, TREE_LL, RING_LL, TREE_SIMPLE, TREE_PLAIN = 0.92, 0.9375, 1 / 3.8, 0.5, 0.92, 0.85
"""The same file, ncclTopoTuneModel: bandwidth of a protocol relative to the plain ring or tree."""
TREE_OVER_SIZES = (
    (1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0, 1.0),
    (1.0, 1.0, 1.0, 1.0, 1.0, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.9, 0.9, 1.0),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.9),
)
"""The same file, treeCorrectionFactor: bandwidth of a tree by protocol, at 64 bytes and each power of two from there to 128 MiB."""


@dataclass(frozen=True)
class Fitted:
    """The numbers of the model of NCCL that are fitted to measurements; ``python -m bench.published fit`` fits them.

    ``network``: fraction of a network card's line rate that large messages reach. ``fill``: until the buffer of an all-reduce has
    ``fill_bytes`` for each rank, its chunks are too small to fill the pipeline of a ring or of NVLS, and it takes ``fill`` more time per
    byte. ``nvls_tree``: microseconds of a hop between nodes of NVLS with a tree. NCCL says 14; then NVLS would win from 2 MiB on 4 nodes
    of B200, where measured times are those of a tree in LL128 up to 16 MiB.
    """

    network: float
    fill: float
    fill_bytes: float
    nvls_tree: float


FITTED = Fitted(network=0.94, fill=0.75, fill_bytes=1.5 * 2**20, nvls_tree=33.0)
"""Fitted to the collectives of docs/hardware.md: 22 on 8 H200, 20 on 32 B200, 11 on 8 A100; all other constants of NCCL's model are
published, except ``cost.nccl.ONE_A_NODE``, which comes from another model."""


@dataclass(frozen=True)
class Architecture:
    """A generation of GPUs.

    NCCL: ``ll``: GB/s of the LL protocol inside a node, on two nodes, on more; ``tree_channel``: GB/s of a channel of a tree by the same;
    ``tree_ll128_channel``: the same in LL128; ``nvls``: bus bandwidth in GB/s of an all-reduce of 8 ranks in NVLink's switch, 0 without it.
    Kernels: ``best``: fraction of the FLOP rate that the best shapes of a matrix product reach, by element size; ``processors``: streaming
    multiprocessors; ``forward``, ``backward``: fraction of the FLOP rate that attention reaches on long sequences; ``memory``: fraction of
    the memory bandwidth.
    """

    ll: tuple[float, float, float]
    tree_channel: tuple[float, float, float]
    tree_ll128_channel: tuple[float, float, float]
    nvls: float
    best: dict[int, float] = field(hash=False)
    processors: int
    forward: float
    backward: float
    memory: float


# NCCL's numbers: tuning.cc as above, llMaxBws (on several nodes by the CPU, here Intel), perChMaxTreeBws, perChMaxTreeLL128Bws.
# best: maximum achievable FLOPS, ml-engineering, compute/accelerator (bfloat16; float8 on H100); sizes without a figure take that of
# bfloat16. forward, backward: A100: 73 % and 63 %, FlashAttention-2 (Dao, 2023); H100: FlashAttention-2 reaches 335 TFLOP/s forward and
# backward (the same), 35 % of the peak (FlashAttention-3, Shah et al., 2024); B200: FlashAttention-2's share of Hopper, for want of a
# figure of training. memory: what a copy reaches of the data sheet.
AMPERE = Architecture(
    ll=(87.7, 39.0, 20.4),
    tree_channel=(24.0, 23.6, 17.8),
    tree_ll128_channel=(20.0, 20.0, 20.0),
    nvls=0.0,
    best={2: 0.869},
    processors=108,
    forward=0.73,
    backward=0.63,
    memory=0.88,
)
HOPPER = Architecture(
    ll=(141.0, 39.0, 20.4),
    tree_channel=(38.7, 41.4, 36.0),
    tree_ll128_channel=(36.7, 36.7, 29.0),
    nvls=480.0,
    best={1: 0.709, 2: 0.803},
    processors=132,
    forward=0.40,
    backward=0.33,
    memory=0.90,
)
BLACKWELL = Architecture(
    ll=(282.0, 39.0, 20.4),
    tree_channel=(70.0, 42.8, 24.0),
    tree_ll128_channel=(55.6, 31.67, 20.0),
    nvls=840.0,
    best={2: 0.776},
    processors=148,
    forward=0.40,
    backward=0.33,
    memory=0.90,
)
ARCHITECTURES = {"ampere": AMPERE, "hopper": HOPPER, "blackwell": BLACKWELL}
