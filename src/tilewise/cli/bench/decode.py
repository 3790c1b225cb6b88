"""`tilewise bench decode`: a step of decoding with a KV cache."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import click

from ..options import DTYPES, HeadList, IntList, Known, LengthSets, NameList, OneInt
from .options import conclude, run_options, show_with

if TYPE_CHECKING:
    from ...bench.decoders import Decoder

GPU = dict(batch=(32, 1), seqlens=(8192,), heads=((32, 8, 128),), dtype="bf16")
CPU = dict(GPU, batch=(1,), dtype="fp32")
QUICK = dict(batch=(2,), seqlens=(512,), heads=((4, 2, 32),), dtype="fp32")


def _decoder(name: str) -> Decoder:
    from ...bench.decoders import decoder

    return decoder(name)


def _caches() -> tuple[str, ...]:
    from ...bench.caches import KINDS

    return (*list(DTYPES)[:3], *KINDS)


@click.command()
@click.option("--batch", type=IntList(), help="Sequences.  [default: 32,1; on a CPU 1]")
@click.option("--seqlens", type=IntList(), help="Keys of each.  [default: 8k]")
@click.option(
    "--lengths",
    type=LengthSets(),
    help="Ragged batches instead: sets as of `bench varlen`, or the keys of each, 160,300.",
)
@click.option(
    "--pages",
    type=IntList(0),
    default="0,16",
    show_default=True,
    help="Keys of a page; 0 is a cache without pages.",
)
@click.option(
    "--queries", type=IntList(), default="1,8", show_default=True, help="The last of a sequence."
)
@click.option(
    "--chunk",
    type=OneInt(),
    help="Queries of the last sequence, of a prompt: beside the others' queries, without them, and "
    "they without it.",
)
@click.option("--split-size", type=OneInt(), help="Of ours.  [default: that of the heads]")
@click.option(
    "--cache",
    "caches",
    type=NameList(_caches),
    default="",
    help="Of bf16 (or fp16, fp32: the queries' dtype), e4m3, int8, with a scale a head, and "
    "e4m3:row, int8:row, with one a row.  [default: the queries' dtype]",
)
@click.option(
    "--heads",
    type=HeadList(),
    help="Query heads, : key heads where these are fewer, x headdim.  [default: 32:8x128]",
)
@click.option("--dtype", type=click.Choice(list(DTYPES)), help="[default: bf16; on a CPU fp32]")
@click.option("--quick", is_flag=True, help="2 sequences of 512 keys, 4:2 heads of 32, fp32.")
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
    help="Of sdpa, cudnn, fa3, flex.",
)
@click.option(
    "--cold",
    type=click.Choice(["rotate", "flush"]),
    default="rotate",
    show_default=True,
    help="How a GPU's L2 cache is kept cold: several KV caches, or a flush before each call.",
)
@run_options
def decode(
    quick, device, ours, against, lengths, pages, queries, chunk, split_size, caches, as_json,
    **options,
) -> None:  # fmt: skip
    """Time a step of decoding: the last queries of each sequence with its KV cache.

    On a GPU a step is the replay of a CUDA graph, and no byte of a cache is in the L2 cache; host
    us are those of an eager call. GB/s counts keys and values alone, share is that of what a copy
    or a sum of a large tensor reached in the same run. Pages lie in no order. All steps of a batch
    are timed in interleaved rounds, each result held to fp64 first.

    Chunks of a prompt are --queries 512,2k, alone, and --chunk 2k, in one call with decodes: as
    --batch 64 --queries 1 --chunk 2k, whose time is held to that of either part.

    A cache of 8 bits is held to fp64 of what it stands for, and its time to that of the queries'
    dtype of the same provider; put it first, as in --cache bf16,e4m3,int8:row.

    sdpa is torch's function, its backend as torch chooses it, with a cache of its own layout: it
    and flex (FlexAttention, compiled) know neither pages nor lengths. fa3 is FlashAttention-3's
    forward with a cache, found as `tilewise bench` finds it; it chooses its splits.
    """
    from ...bench.decode import run_decode
    from ...bench.decode_table import summary

    usual = QUICK if quick else GPU if device.startswith("cuda") else CPU
    asked = {name: options.pop(name) or value for name, value in usual.items()}
    chosen = [_decoder(name) for name in dict.fromkeys((ours, *against))]
    try:
        counts = counts_of(queries, chunk)
        cases = cases_of(asked, lengths, pages, counts, caches, split_size or 0)
    except ValueError as error:
        raise click.UsageError(f"--queries, --chunk, --cache, --dtype: {error}") from error
    done = run_decode(cases, chosen, device=device, show=show_with(as_json), **options)
    outcomes = [outcome for each in done for outcome in each]
    conclude(outcomes, summary(done), as_json, [chosen[0].name])


def counts_of(queries, chunk: int | None) -> list[tuple[int, int]]:
    """Queries of each sequence, and of the last."""
    if chunk is None:
        return [(number, -1) for number in queries]
    return [(0, chunk), *(pair for number in queries for pair in ((number, 0), (number, chunk)))]


def cases_of(asked: dict, lengths, pages, counts, caches, split_size: int = 0) -> list[list]:
    """The steps that are timed together: a list for each batch and head."""
    from ...bench.caches import decode

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
            )
            for kind in kinds
            for number, chunk in counts
            for page_size in pages
        ]
        for heads in asked["heads"]
        for batch, seqlen, name in batches
    ]
