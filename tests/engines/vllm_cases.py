"""Runs vLLM's own engine on a CPU with tilewise, once for each case, and writes what it found as
JSON: `python vllm_cases.py FOLDER [case ...]`, in the environment of requirements-vllm.txt.

vLLM is imported once and each case is a fork, as the import takes longer than most cases.
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path

ENVIRONMENT = dict(
    TILEWISE_VLLM_CPU="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
os.environ.update(ENVIRONMENT)

import tiny_models  # noqa: E402
import torch  # noqa: E402

TOKENS = 40
LENGTHS = [5, 40, 301, 17, 100, 64]
K_SCALE, V_SCALE = 0.02, 0.05


def prompts(shared=0, lengths=LENGTHS):
    """Random tokens, the first `shared` of them the same in all."""
    draw = random.Random(1)
    first = [draw.randrange(3, 512) for _ in range(shared)]
    return [first + [draw.randrange(3, 512) for _ in range(n)] for n in lengths]


def phrases():
    """A phrase of 12 tokens six times, which a drafter finds that looks for the last tokens."""
    draw = random.Random(2)
    return [[draw.randrange(3, 512) for _ in range(12)] * 6 for _ in range(6)]


class Watch:
    """Counts what the engine does: calls of our layers, steps that mix chunks with single tokens,
    preemptions.
    """

    def __init__(self):
        from vllm.v1.core.sched.scheduler import Scheduler

        from tilewise.integrations.vllm.impl import TilewiseImpl
        from tilewise.integrations.vllm.metadata import TilewiseBuilder

        self.counts = dict(forwards=0, appends=0, steps=0, mixed=0, preempted=0)
        self._watch(TilewiseImpl, "forward", self._forward)
        self._watch(TilewiseImpl, "do_kv_cache_update", self._append)
        self._watch(TilewiseBuilder, "build", self._build)
        self._watch(Scheduler, "_preempt_request", self._preempt)

    def _watch(self, owner, name, note):
        method = getattr(owner, name)

        def noted(this, *args, **options):
            note(*args, **options)
            return method(this, *args, **options)

        setattr(owner, name, noted)

    def _forward(self, *args, **options):
        self.counts["forwards"] += args[5] is not None

    def _append(self, *args, **options):
        self.counts["appends"] += 1

    def _build(self, prefix, common, fast_build=False):
        queries = common.query_start_loc_cpu.diff().tolist()
        self.counts["steps"] += 1
        self.counts["mixed"] += min(queries, default=0) == 1 < max(queries, default=0)

    def _preempt(self, *args, **options):
        self.counts["preempted"] += 1


def engine(folder, **options):
    from vllm import LLM

    settings = dict(dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8, seed=0)
    settings |= dict(max_num_batched_tokens=128, skip_tokenizer_init=True, disable_log_stats=False)
    return LLM(str(folder), **settings | options)


def layers(llm):
    """vLLM's attention layers, by name."""
    config = llm.llm_engine.engine_core.engine_core.vllm_config
    found = config.compilation_config.static_forward_context
    return {name: x for name, x in found.items() if hasattr(x, "impl")}


def describe(llm, watch):
    """What every case tells."""
    found = layers(llm).values()
    impls = sorted({f"{type(x.impl).__module__}.{type(x.impl).__name__}" for x in found})
    caches = [x.kv_cache for x in found]
    return dict(
        watch.counts,
        impls=impls,
        strides=[list(x.stride()) for x in caches][:1],
        shapes=[list(x.shape) for x in caches][:1],
        dtypes=sorted({str(x.dtype) for x in caches}),
    )


def ask(llm, asked, **sampling):
    from vllm import SamplingParams

    how = dict(temperature=0, ignore_eos=True, detokenize=False) | sampling
    return llm.generate(
        [dict(prompt_token_ids=x) for x in asked], SamplingParams(**how), use_tqdm=False
    )


def generates(folder, asked, **options):
    """Greedy tokens beside transformers'."""
    watch = Watch()
    llm = engine(folder, **options)
    answers = ask(llm, asked, max_tokens=TOKENS, logprobs=0)
    metrics = {x.name: getattr(x, "value", None) for x in llm.get_metrics()}
    return dict(
        describe(llm, watch),
        cached=[x.num_cached_tokens for x in answers],
        accepted=metrics.get("vllm:spec_decode_num_accepted_tokens"),
        found=[chosen(answer) for answer in answers],
        expected=tiny_models.generate(folder, asked, TOKENS),
    )


def chosen(answer):
    """The tokens of an answer, and their log-probabilities."""
    tokens = list(answer.outputs[0].token_ids)
    return tokens, [x[token].logprob for x, token in zip(answer.outputs[0].logprobs, tokens)]


def scores(folder, asked, set_scales=False, reference=None, **options):
    """Log-probabilities of the prompts' own tokens beside transformers'."""
    watch = Watch()
    llm = engine(folder, **options)
    if set_scales:
        for layer in layers(llm).values():
            layer._k_scale.fill_(K_SCALE)
            layer._v_scale.fill_(V_SCALE)
    answers = ask(llm, asked, max_tokens=1, prompt_logprobs=0)
    found = [
        [x[token].logprob for x, token in zip(answer.prompt_logprobs[1:], prompt[1:])]
        for answer, prompt in zip(answers, asked)
    ]
    other = reference or {}
    return dict(
        describe(llm, watch),
        found=found,
        expected=tiny_models.score(folder, asked, **other),
        without=tiny_models.score(folder, asked, **WITHOUT.get(folder.name, {})),
    )


# What the case is about, left out: log-probabilities must be far from these
WITHOUT = {"gemma2": dict(attn_logit_softcapping=None)}


def by_tensor(x, name):
    scale = dict(k=K_SCALE, v=V_SCALE)[name]
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def by_row(dtype, largest):
    def round_rows(x, name):
        scale = x.abs().amax(-1, keepdim=True) / largest
        rows = x / scale
        rows = (
            rows.to(dtype) if dtype.is_floating_point else rows.round().clamp(-127, 127).to(dtype)
        )
        return rows.to(x.dtype) * scale

    return round_rows


def share_slots(worker):
    """Lets vLLM's CPU build give each rank its keys, as its kernel for GPUs does, and counts calls
    of our layers, in a worker's process.
    """
    from vllm.v1.worker.block_table import BlockTable

    from tilewise.integrations.vllm.impl import TilewiseImpl

    def slots(table, num_reqs, query_start_loc, positions):
        counts = query_start_loc[: num_reqs + 1].diff()
        request = torch.arange(num_reqs).repeat_interleave(counts.long())
        position, turn = positions[: len(request)], table.cp_kv_cache_interleave_size
        row = position // (turn * table.dcp_world_size) * turn + position % turn
        block = table.block_table.gpu[request, row // table.block_size].long()
        is_mine = position // turn % table.dcp_world_size == table.dcp_rank
        found = torch.where(is_mine, block * table.block_size + row % table.block_size, -1)
        table.slot_mapping.gpu.fill_(-1)[: len(request)] = found

    BlockTable.compute_slot_mapping = slots
    forward, worker.forwards = TilewiseImpl.forward, 0

    def counted(*args, **options):
        worker.forwards += 1
        return forward(*args, **options)

    TilewiseImpl.forward = counted


def tell(worker):
    """What a worker's layers are, and how often they were called."""
    found = worker.vllm_config.compilation_config.static_forward_context.values()
    impls = {f"{type(x.impl).__module__}.{type(x.impl).__name__}" for x in found}
    return sorted(impls), worker.forwards, sorted({x.impl.dcp_world_size for x in found})


def ranks(folder, asked, **options):
    """Greedy tokens of two processes, each with half of the heads and half of the keys."""
    llm = engine(folder, tensor_parallel_size=2, decode_context_parallel_size=2, **options)
    llm.collective_rpc(share_slots)
    answers = ask(llm, asked, max_tokens=TOKENS, logprobs=0)
    (impls, forwards, parts), _ = llm.collective_rpc(tell)
    return dict(
        impls=impls,
        forwards=forwards,
        parts=parts,
        found=[chosen(answer) for answer in answers],
        expected=tiny_models.generate(folder, asked, TOKENS),
    )


def rounded(round_rows):
    return tiny_models.rounded_attention(round_rows)


def encodes(folder, asked):
    watch = Watch()
    settings = dict(max_num_batched_tokens=1024, skip_tokenizer_init=False)
    llm = engine(
        folder,
        runner="pooling",
        pooler_config=dict(task="token_embed", use_activation=False),
        **settings,
    )
    answers = llm.encode(
        [dict(prompt_token_ids=x) for x in asked], pooling_task="token_embed", use_tqdm=False
    )
    return dict(
        describe(llm, watch),
        found=[x.outputs.data.tolist() for x in answers],
        expected=tiny_models.embed(folder, asked),
    )


NGRAM = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4, prompt_lookup_min=2)
E4M3 = torch.float8_e4m3fn
CASES = {
    "llama": ("llama", lambda x: generates(x, prompts())),
    "llama, heads first": (
        "llama",
        lambda x: generates(x, prompts(), block_size=16, max_num_batched_tokens=48),
    ),
    "llama, compiled": ("llama", lambda x: generates(x, prompts(), enforce_eager=False)),
    "llama, preemption": (
        "llama",
        lambda x: generates(
            x, prompts(), block_size=16, num_gpu_blocks_override=24, max_model_len=368
        ),
    ),
    "llama, prefix": (
        "llama",
        lambda x: generates(x, prompts(200), block_size=16, enable_prefix_caching=True),
    ),
    "llama, drafts": ("repeating", lambda x: generates(x, phrases(), speculative_config=NGRAM)),
    "mistral": ("mistral", lambda x: generates(x, prompts())),
    "gpt_oss": ("gpt_oss", lambda x: generates(x, prompts())),
    "bloom": ("bloom", lambda x: generates(x, prompts())),
    "gemma2": ("gemma2", lambda x: scores(x, prompts())),
    "llama, fp8": (
        "llama",
        lambda x: scores(
            x, prompts(), set_scales=True, reference=rounded(by_tensor), kv_cache_dtype="fp8"
        ),
    ),
    "llama, fp8_per_token_head": (
        "llama",
        lambda x: scores(
            x,
            prompts(),
            reference=rounded(by_row(E4M3, 448)),
            kv_cache_dtype="fp8_per_token_head",
        ),
    ),
    "llama, int8_per_token_head": (
        "llama",
        lambda x: scores(
            x,
            prompts(),
            reference=rounded(by_row(torch.int8, 127)),
            kv_cache_dtype="int8_per_token_head",
        ),
    ),
    "llama, ranks": (
        "one_key_head",
        lambda x: ranks(x, prompts(), block_size=16, cp_kv_cache_interleave_size=4),
    ),
    "bert": ("bert", lambda x: encodes(x, prompts())),
}
# A core for each of two processes, which run functions of this file
CORES = [*sorted(os.sched_getaffinity(0)), 0][:2]
SWITCHES = {
    "llama, heads first": dict(VLLM_KV_CACHE_LAYOUT="LBHNC"),
    "llama, ranks": dict(
        VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, CORES)), VLLM_ALLOW_INSECURE_SERIALIZATION="1"
    ),
}


def run(name, folder):
    """The result of a case, from a fork."""
    target = folder / f"{name.replace(', ', '-').replace(' ', '_')}.json"
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return json.loads(target.read_text()) if target.exists() else dict(error="it crashed")
    os.environ.update(SWITCHES.get(name, {}))
    model, case = CASES[name]
    try:
        found = case(folder / model)
    except BaseException as error:
        traceback.print_exc()
        found = dict(error=f"{type(error).__name__}: {error}")
    target.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def main(folder, names):
    os.environ["VLLM_CACHE_ROOT"] = str(folder / "cache")  # of what it compiles
    for model in {CASES[name][0] for name in names}:
        if not (folder / model).exists():
            tiny_models.make(model, folder / model)
    import vllm
    import vllm.entrypoints.llm
    import vllm.v1.engine.core

    found = {}
    for name in names:
        case = found[name] = run(name, folder)
        print(name, {x: y for x, y in case.items() if x not in ("found", "expected", "without")})
    (folder / "cases.json").write_text(json.dumps(dict(vllm=vllm.__version__, cases=found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
