"""Kernel arguments in groups, each a NamedTuple.

The runtime groups hold pointers and numbers; `Features` and `Tile` are constexpr and select code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Strided(NamedTuple):
    """A (batch, seqlen, nheads, headdim) tensor: its memory and its strides in elements; the last
    dimension is contiguous.
    """

    ptr: torch.Tensor
    batch: int
    row: int
    head: int


class Table(NamedTuple):
    """Where pages lie: of a cache without a table, a page is a sequence."""

    page_table: torch.Tensor | None
    stride: int
    num_pages: int
    page_size: int


class Parts(NamedTuple):
    """The parts that the keys of each tile are divided into, and the memory of their states."""

    acc_o: torch.Tensor  # fp32, rows by tile, part, warpgroup, then by program, warpgroup
    m_i: torch.Tensor
    l_i: torch.Tensor
    count: int
    whole: int  # tiles of which one program computes all parts; they come first


class Optionals(NamedTuple):
    """Memory of the optional tensors, or None; the constexpr flags of `Features` say which are
    there.
    """

    alibi_slopes: torch.Tensor | None
    alibi_batch: int  # its stride over the batch; 0 where one set serves all
    sinks: torch.Tensor | None
    seqused_k: torch.Tensor | None
    seqused_q: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    dropout_rng: torch.Tensor | None = None
    modifiers: Modifiers | int = 0
    runs: Runs | None = None
    pages: Table | None = None  # where keys are pages of a cache
    parts: Parts | None = None  # where programs share the keys of a tile
    scales: Any = None  # of a cache of 8 bits: `hopper.decode.scales.Scales`


class Runs(NamedTuple):
    """Runs of rows of one sequence, which see overlapping keys of it, and pieces of these keys that
    arrive while the kernel runs. All numbers are in memory, for they differ with the layout.
    """

    table: torch.Tensor  # int32, of hopper/fwd/runs_launch.py
    words: torch.Tensor  # int32, of common/device_words.py
    limit: int  # nanoseconds of a wait


class Modifiers(NamedTuple):
    """score_mod, mask_mod, bias, block lists; 0 is None, which Triton functions cannot return."""

    bias: Bias | int
    mask_tensors: tuple | int  # what the mask and the score function captured
    score_tensors: tuple | int
    by_queries: Lists | int  # of a block mask: blocks of keys for each block of queries
    by_keys: Lists | int  # and the other way round


class Bias(NamedTuple):
    """A bias and its strides over the scores, 0 where it is shared; or its gradient."""

    ptr: torch.Tensor
    batch: int
    head: int
    row: int
    column: int


class Lists(NamedTuple):
    """For each block of one side, the partial and the full blocks of the other.

    The block in row `r` of a head has number n = batch * batch_rows + head * head_rows + r, counts
    at n, and indices from n times a width on.
    """

    partial_counts: torch.Tensor
    partial: torch.Tensor
    partial_width: int
    full_counts: torch.Tensor
    full: torch.Tensor
    full_width: int
    batch_rows: int  # 0 where all share one mask
    head_rows: int
    blocks: int  # of the other side, which the lists index


class Sizes(NamedTuple):
    """Runtime lengths of the whole call; of packed sequences, of all of them together."""

    packed: int  # how many sequences; 0 where they are rows of a batch, and not asked for
    nheads: int
    seqlen_q: int
    seqlen_k: int


class Numbers(NamedTuple):
    """Runtime numbers of the score function and the band."""

    scale: float
    scale_log2: float  # scale * log2(e): scores in base 2
    softcap_log2: float  # softcap * log2(e)
    scale_over_softcap: float
    left: int
    right: int
    dropout_threshold: float = 0.0  # of 256: bytes below it are dropped
    dropout_factor: float = 1.0  # of those that are not


class Features(NamedTuple):
    """Constexprs that select a kernel's code."""

    HEADDIM: int
    HEADDIM_V: int
    GROUP: int  # query heads that share one key head
    LEFT: bool  # the band is closed on the left
    RIGHT: bool
    TOP_LEFT: bool  # the diagonal starts at (0, 0) instead of ending at the last query and key
    SOFTCAP: bool
    FAST_TANH: bool  # for the softcap, by an instruction that is right to 11 bits
    ALIBI: bool
    SINKS: bool
    SEQUSED_K: bool
    SEQUSED_Q: bool
    PACKED: bool  # sequences lie end to end; cu_seqlens say where they begin
    BIAS: bool
    DROPOUT: bool
    MASK_M: int  # rows of queries and of keys in a block of the block mask; 0 without one
    MASK_N: int
    MASK_MOD: Any  # compiled functions, or None
    SCORE_MOD: Any
    SCORE_DERIVATIVE: Any
    PRECISION: str  # of a matmul of fp32 tiles: "ieee" keeps fp32 exact
    NATURAL: bool = False  # scores are in natural units, as a bias or score function has them
    ENDS: bool = False  # the mask is intervals of keys and of queries, and its tensors are the ends
    RUNS: bool = False  # with PACKED: sequences are `Runs`, whose keys may still arrive
    # With PACKED, over a KV cache: sequences of so many queries are chunks, the training forward's,
    # and the others decodes; 0 where one kernel computes all
    CHUNK: int = 0


class Tile(NamedTuple):
    """A tile's rows of queries and of keys, its padded head dims, and how tiles are read."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    DESCRIPTORS: bool  # read through tensor descriptors instead of pointers
    CHUNK: int = 0  # columns of a head that S and dP are summed over at a time; 0: all at once


class Queue(NamedTuple):
    """The tiles of a launch, handed out by a counter."""

    counter: torch.Tensor  # int32, 0 between launches
    tiles: int
    nheads: int  # of one sequence; key heads where their query heads share a tile
    heads: int  # of the whole batch
    # heads whose tiles are interleaved for L2 reuse; packed, backward: blocks of such heads
    l2_group: int


class Pipeline(NamedTuple):
    """The tile shape and pipeline of a Hopper program."""

    BLOCK_M: int  # queries: 64 rows a warpgroup, divided by PACK
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    WARPGROUPS: int  # that do matmuls
    STAGES: int  # for tiles of K, and of V
    Q_STAGES: int
    PACK: int  # heads of a group that share a tile, as neighbouring rows
    BIAS_STEP: int = 0  # 1 or, by pairs, 2 to the next key's; 0: keys share it, -1: further apart
    BIAS_COPIED: bool = False  # whether TMA loads the bias
    V_FLAT: bool = False  # whether heads of V are columns of rows that hold them all
    FP8: bool = False  # whether tiles are of 8 bits: V^T instead of V, and keys downwards
    TRANSPOSES: bool = False  # with FP8: whether the kernel makes V^T of V
    PAGE: int = 0  # keys of a copy, where they lie in pages: a page, or a block of one
    CACHE: str = ""  # "e4m3" or "int8": of 8-bit keys and values, which warps convert
    STAGED: int = 0  # tiles of these that wait for it


class SplitPipeline(NamedTuple):
    """A tile of attention with a KV cache, and how keys pass through a Hopper program."""

    ROWS: int  # of a warpgroup: queries times query heads of a key head
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    STAGES: int  # for tiles of K, and of V
    Q_STAGES: int
    BY_TMA: bool  # whether TMA copies keys and values, else threads do
    STATE_IN_SHARED: bool  # whether folded pieces lie there: registers have no room for two states
    COPY_WARPS: int = 4  # that copy where TMA does not
    CACHE: str = ""  # "e4m3" or "int8" where keys and values have 8 bits; else they are as queries
    WARPGROUPS: int = 1  # that multiply, each with ROWS of its own, and share tiles of K and V
    BLOCK_M: int = 64  # rows of tiles in registers and shared memory, of which ROWS may be queries
    SWAPPED: bool = False  # whether keys are the rows of wgmma, and the tile's rows its columns
    PROGRAMS: int = 1  # on an SM at a time
    STATES: bool = False  # whether states of pieces are the result, and no program folds them


class KeyPipeline(NamedTuple):
    """The tile and pipeline of the Hopper backward: a program holds keys and loops over queries."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_DV: int
    ORDERED: bool  # whether tiles add to dQ in the order of their keys
    LSE_FIRST: bool  # whether S starts from -lse, as it can unless something comes between
    RAGGED: bool  # whether each sequence has lengths of its own
    HAS_METADATA: bool = False  # per-block metadata: indices and random state
    BIAS_COPIED: bool = False  # whether TMA loads the bias
    BIAS_GRAD: bool = False  # whether TMA stores dS, which is the gradient of the bias
    SPREAD: int = 0  # blocks over which the beginnings of long causal tiles are spread; 0: none
    HAS_DQ: bool = True  # whether tiles add to dQ, which else a kernel of its own computes


class Lengths(NamedTuple):
    """The queries and keys of a sequence, and the key on the diagonal of query 0."""

    seqlen_q: int
    seqlen_k: int
    diagonal: int


class SequenceOffsets(NamedTuple):
    """A sequence's offsets in its tensors, and its rows there, padding included."""

    batch: int  # 0 where sequences are packed
    first_q: int  # 0 where they are not
    first_k: int
    rows_q: int
    rows_k: int
    seqlen_q: int  # of these rows, those of the sequence itself
    seqlen_k: int


class Sequence(NamedTuple):
    """One head of one sequence: all that its scores and masks depend on."""

    lengths: Lengths
    slope_log2: float  # ALiBi, in base 2
    numbers: Numbers
    batch: int = 0  # which row of the batch, or which packed sequence
    head: int = 0
    modifiers: Modifiers | int = 0
    stream: Any = 0  # of dropout's random numbers
    origin: Any = 0  # the position from which the columns of a tile are counted


class ListedBlocks(NamedTuple):
    """Blocks of a block mask: how many, and the addresses of their indices. An index is less than
    `blocks`, of a full block less than `whole`.
    """

    partial_count: int
    partial: torch.Tensor
    blocks: int
    full_count: int
    full: torch.Tensor
    whole: int


class BlockRange(NamedTuple):
    """Blocks [first, stop) are visited; of them [full_first, full_stop) need no mask, the rest are
    partial.
    """

    first: int
    full_first: int
    full_stop: int
    stop: int
