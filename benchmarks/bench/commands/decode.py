"""`python -m benchmarks bench decode`: a step of decoding with a KV cache."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import click

from tilewise.cli.options import DTYPES, IntList, Known, NameList, OneInt

from ...options import HeadList, LengthSets, conclude, run_options, show_with

if TYPE_CHECKING:
    from ..decoders import Decoder

GPU = dict(batch=(32, 1), seqlens=(8192,), heads=((32, 8, 128),), dtype="bf16")
CPU = dict(GPU, batch=(1,), dtype="fp32")
QUICK = dict(batch=(2,), seqlens=(512,), heads=((4, 2, 32),), dtype="fp32")


def _decoder(name: str) -> Decoder:
    from ..decoders import decoder

    return decoder(name)


def _caches() -> tuple[str, ...]:
    from tilewise.explain.steps import KINDS

    return (*list(DTYPES)[:3], *KINDS)


@click.command()
@click.option("--batch", type=IntList(), help="Sequences per batch.  [default: 32,1; on a CPU 1]")
@click.option("--seqlens", type=IntList(), help="Keys per sequence.  [default: 8k]")
@click.option(
    "--lengths",
    type=LengthSets(),
    help="Ragged batches instead: named sets as in `bench varlen`, or each one's keys: 160,300.",
)
@click.option(
    "--pages",
    type=IntList(0),
    default="0,16",
    show_default=True,
    help="Keys per page; 0 means a cache without pages.",
)
@click.option(
    "--queries",
    type=IntList(),
    default="1,8",
    show_default=True,
    help="Queries per sequence, its last.",
)
@click.option(
    "--chunk",
    type=OneInt(),
    help="Prompt queries in the last sequence; times the mixed batch and both parts alone.",
)
@click.option(
    "--chunks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many sequences, the last, have a chunk.",
)
@click.option(
    "--append",
    "appends",
    is_flag=True,
    help="The call also appends its queries' keys and rotates both (RoPE).",
)
@click.option("--split-size", type=OneInt(), help="tilewise's split size.  [default: none]")
@click.option(
    "--cache",
    "caches",
    type=NameList(_caches),
    default="",
    help="bf16 (or fp16, fp32: the queries' dtype), e4m3 and int8 with one scale per head, "
    "e4m3:row and int8:row with one per row.  [default: the queries' dtype]",
)
@click.option(
    "--heads",
    type=HeadList(),
    help="QUERY_HEADS[:KEY_HEADS]xHEADDIM.  [default: 32:8x128]",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="[default: bf16; on a CPU fp32]")
@click.option("--quick", is_flag=True, help="2 sequences with 512 keys, heads 4:2x32, fp32.")
@click.option(
    "--provider",
    "ours",
    type=Known(_decoder),
    default="tilewise",
    show_default=True,
    help="Or tilewise:portable.",
)
@click.option(
    "--against",
    type=NameList(each=Known(_decoder)),
    default="sdpa,fa3",
    show_default=True,
    help="Peers: sdpa, cudnn, fa3, flex.",
)
@click.option(
    "--cold",
    type=click.Choice(["rotate", "flush"]),
    default="rotate",
    show_default=True,
    help="Keep a GPU's L2 cache cold with several KV caches, or with a flush before each call.",
)
@run_options
def decode(
    quick, device, ours, against, lengths, pages, queries, chunk, chunks, appends, split_size,
    caches, as_json,
    **options,
) -> None:  # fmt: skip
    """Time a decoding step: the last queries of each sequence, with its KV cache.

    On a GPU, a step replays a CUDA graph with no part of the cache in L2; "host us" is the time for
    an eager call. GB/s counts only keys and values. "share" compares that with the best copy or sum
    of a large tensor in the same run. Pages are in random order. All steps of a batch run in
    interleaved rounds, after each result is checked against fp64.

    To time prompt chunks alone, pass --queries 512,2k. To time a chunk and decodes in one call,
    pass for example --batch 64 --queries 1 --chunk 2k, which compares it with both parts.

    An 8-bit cache is checked against fp64 on its dequantised values. Its time is compared with the
    same provider's 16-bit cache, which comes first: --cache bf16,e4m3,int8:row.

    sdpa is torch's function with torch's choice of backend and its own cache layout. Neither it nor
    flex (compiled FlexAttention) supports pages or lengths. fa3 is FlashAttention-3's forward with
    a cache, located as in `bench`; it chooses its splits.
    """
    from ..decode import run_decode
    from ..decode_table import summary

    usual = QUICK if quick else GPU if device.startswith("cuda") else CPU
    asked = {name: options.pop(name) or value for name, value in usual.items()}
    chosen = [_decoder(name) for name in dict.fromkeys((ours, *against))]
    try:
        counts = counts_of(queries, chunk)
        cases = cases_of(
            asked, lengths, pages=pages, counts=counts, caches=caches,
            split_size=split_size or 0, appends=appends, chunks=chunks,
        )  # fmt: skip
    except ValueError as error:
        raise click.UsageError(
            f"--queries, --chunk, --append, --cache, --dtype: {error}"
        ) from error
    done = run_decode(cases, chosen, device=device, show=show_with(as_json), **options)
    outcomes = [outcome for each in done for outcome in each]
    conclude(outcomes, summary(done), as_json, [chosen[0].name])


def counts_of(queries, chunk: int | None) -> list[tuple[int, int]]:
    """Queries of each sequence, and of the last."""
    if chunk is None:
        return [(number, -1) for number in queries]
    return [(0, chunk), *(pair for number in queries for pair in ((number, 0), (number, chunk)))]


def cases_of(
    asked: dict,
    lengths,
    pages,
    counts,
    caches,
    split_size: int = 0,
    appends: bool = False,
    chunks: int = 1,
) -> list[list]:
    """The steps that are timed together: a list for each batch and head."""
    from tilewise.explain.steps import decode

    kinds = ["" if name == asked["dtype"] else name for name in caches] or [""]
    plain = itertools.product(asked["batch"], asked["seqlens"])
    batches: list[tuple[int, int, str]] = [(batch, seqlen, "") for batch, seqlen in plain]
    if lengths:
        batches = [(0, 0, name) for name in lengths]
    return [
        [
            decode(
                *(batch, seqlen, heads),
                lengths=name,
                queries=number,
                page_size=page_size,
                dtype=DTYPES[asked["dtype"]],
                cache=kind,
                chunk=chunk,
                split_size=split_size,
                appends=appends,
                chunks=chunks,
            )
            for kind in kinds
            for number, chunk in counts
            for page_size in pages
        ]
        for heads in asked["heads"]
        for batch, seqlen, name in batches
    ]
