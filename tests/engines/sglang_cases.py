"""Runs SGLang's own engine on a CPU with tilewise, once for each case, and writes what it found as
JSON: `python sglang_cases.py FOLDER [case ...]`, in the environment of requirements-sglang.txt.

Engine, scheduler, radix cache, allocator, model runner and models are SGLang's; what is compiled
for it (`sgl_kernel`) and torchvision are names in sglang_names. SGLang is imported once, and each
case and its processes are forks of that one, except where a case says that they are new.
"""

import importlib.util
import json
import multiprocessing
import os
import random
import sys
import traceback
from pathlib import Path

HERE = Path(__file__).parent
STUBS = HERE / "sglang_names"
os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
if importlib.util.find_spec("sgl_kernel") is None:
    sys.path.insert(0, str(STUBS))
    # For processes that are no forks
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )

import tiny_models  # noqa: E402
import torch  # noqa: E402

TOKENS = 20
LENGTHS = [5, 40, 301, 17, 100, 64]


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
    """Counts, in memory that processes share, what the engine does: backends it made, calls of
    layers, and batches: of all kinds, of prompts behind a prefix, of those with single tokens, and
    of drafts.
    """

    NAMES = "backends", "appends", "forwards", "batches", "prefixes", "mixed", "verified"

    def __init__(self):
        from tilewise.integrations.engines import Layer
        from tilewise.integrations.sglang.backend import TilewiseBackend

        self._numbers = multiprocessing.get_context("fork").Array("q", len(self.NAMES))
        self._watch(TilewiseBackend, "__init__", lambda *_: self._add("backends"))
        self._watch(TilewiseBackend, "init_forward_metadata", self._batch)
        self._watch(Layer, "append", lambda *_, **__: self._add("appends"))
        self._watch(Layer, "attend", lambda *_, **__: self._add("forwards"))

    def _watch(self, owner, name, note):
        method = getattr(owner, name)

        def noted(this, *args, **options):
            note(*args, **options)
            return method(this, *args, **options)

        setattr(owner, name, noted)

    def _add(self, name):
        with self._numbers.get_lock():
            self._numbers[self.NAMES.index(name)] += 1

    def _batch(self, batch):
        news, before = batch.extend_seq_lens_cpu or (), batch.extend_prefix_lens_cpu or ()
        self._add("batches")
        if any(n > 1 and m > 0 for n, m in zip(news, before)):
            self._add("prefixes")
        if any(n == 1 and m > 0 for n, m in zip(news, before)) and max(news) > 1:
            self._add("mixed")  # which SGLang's runner calls EXTEND, too
        if batch.forward_mode.is_target_verify():
            self._add("verified")

    @property
    def counts(self):
        return dict(zip(self.NAMES, self._numbers))


def engine(folder, **options):
    from sglang.srt.entrypoints.engine import Engine

    settings = dict(dtype="float32", device="cpu", attention_backend="tilewise", page_size=16)
    settings |= dict(max_total_tokens=4096, max_running_requests=8, chunked_prefill_size=64)
    settings |= dict(skip_tokenizer_init=True, sampling_backend="pytorch", log_level="error")
    settings |= dict(disable_cuda_graph=True, disable_overlap_schedule=True, random_seed=0)
    return Engine(model_path=str(folder), **settings | options)


def start(folder, forks=True, **options):
    """What counts, and an engine whose processes are forks of this one or import all again."""
    if forks:
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *args, **kwargs: None
    watch = Watch()
    return watch, engine(folder, **options)


def ask(server, asked, **options):
    """(tokens, log-probabilities) of each answer, and what the engine says of them. SGLang does not
    mix batches of requests that want log-probabilities.
    """
    sampling = dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    answers = server.generate(input_ids=asked, sampling_params=sampling, **options)
    found = []
    for answer in answers:
        scores = [x[0] for x in answer["meta_info"].get("output_token_logprobs") or ()]
        found.append((answer["output_ids"][-TOKENS:], scores))
    return found, [x["meta_info"] for x in answers]


def generates(folder, asked, **options):
    """Greedy tokens beside transformers', in batches that mix prompts and single tokens; then their
    log-probabilities.
    """
    watch, server = start(folder, enable_mixed_chunk=True, **options)
    mixed, told = ask(server, asked)
    counts = watch.counts
    again, told_again = ask(server, asked, return_logprob=True)
    server.shutdown()
    return dict(
        counts,
        accepted=sum(x.get("spec_num_correct_drafts", 0) for x in told),
        cached=[x["cached_tokens"] for x in told],
        cached_again=[x["cached_tokens"] for x in told_again],
        retracted=sum(x["num_retractions"] for x in told),
        found=again,
        in_mixed_batches=[tokens for tokens, _ in mixed],
        expected=tiny_models.generate(folder, asked, TOKENS),
    )


def scores(folder, asked, reference=None, **options):
    """Log-probabilities of the prompts' own tokens beside transformers'."""
    watch, server = start(folder, **options)
    answers = server.generate(
        input_ids=asked,
        sampling_params=dict(temperature=0, max_new_tokens=1),
        return_logprob=True,
        logprob_start_len=0,
    )
    server.shutdown()
    told = [x["meta_info"]["input_token_logprobs"][1:] for x in answers]
    return dict(
        watch.counts,
        found=[[score for score, *_ in of_prompt] for of_prompt in told],
        expected=tiny_models.score(folder, asked, **(reference() if reference else {})),
        without=tiny_models.score(folder, asked, **WITHOUT.get(folder, {})),
    )


def embeds(folder, asked):
    """Normalised hidden states of the first token beside transformers'."""
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    watch, server = start(folder, is_embedding=True, disable_radix_cache=True)
    request = EmbeddingReqInput(input_ids=asked)  # `encode` takes texts alone
    generator = server.tokenizer_manager.generate_request(request, None)
    found = server.loop.run_until_complete(anext(generator))
    server.shutdown()
    expected = [torch.tensor(rows[0]) for rows in tiny_models.embed(folder, asked)]
    return dict(
        watch.counts,
        found=[x["embedding"] for x in found],
        expected=[(x / x.norm()).tolist() for x in expected],
    )


# What the case is about, left out: log-probabilities must be far from these
WITHOUT = {"gemma2": dict(attn_logit_softcapping=None)}


def short_of_slots():
    """The scheduler expects one token of each request, and finds no slots for the others."""
    from sglang.srt.managers import schedule_policy

    schedule_policy.CLIP_MAX_NEW_TOKENS = 1
    asked = prompts(lengths=[40] * 6)
    return generates("llama", asked, max_total_tokens=320, schedule_conservativeness=0.0)


def rounded():
    """transformers' attention over K and V as a pool of 8 bits holds them, with scales of 1."""
    return tiny_models.rounded_attention(lambda x, name: x.to(torch.float8_e4m3fn).to(x.dtype))


def eight_bits():
    """SGLang refuses 8 bits where its own CPU backend would not support them."""
    from sglang.srt.mem_cache import kv_cache_configurator

    kv_cache_configurator.cpu_has_amx_support = lambda: True
    kv_cache_configurator.attention_backends = lambda: ("intel_amx", "intel_amx")
    asked = prompts(lengths=[100, 17])
    return scores("llama", asked, kv_cache_dtype="fp8_e4m3", reference=rounded)


def drafted(breadth):
    """Drafts of n-grams, which are trees: at a breadth of 1, of one branch for each n."""
    return generates(
        "repeating",
        phrases(),
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=6,
        speculative_ngram_max_bfs_breadth=breadth,
        page_size=1,  # SGLang drafts on a CPU with no other
    )


CASES = {
    "llama": lambda: generates("llama", prompts()),
    "llama, page 1": lambda: generates("llama", prompts(), page_size=1),
    "llama, prefix": lambda: generates("llama", prompts(shared=200)),
    "llama, retraction": short_of_slots,
    "llama, overlap": lambda: generates("llama", prompts(), disable_overlap_schedule=False),
    "repeating, drafts": lambda: drafted(breadth=1),
    "repeating, wide drafts": lambda: drafted(breadth=4),
    "llama, plug-in": lambda: generates("llama", prompts(lengths=[40, 5]), forks=False),
    "llama, fp8": eight_bits,
    "olmo3": lambda: generates("olmo3", prompts()),
    "olmo3, torch_native": lambda: generates("olmo3", prompts(), attention_backend="torch_native"),
    "gemma2": lambda: scores("gemma2", prompts(lengths=[100, 17])),
    "bert": lambda: embeds("bert", prompts(lengths=[40, 5])),
}


def run(folder, name):
    """A case in a process of its own; its JSON."""
    path = folder / f"{name}.json"
    pid = os.fork()
    if pid == 0:
        try:
            found = CASES[name]()
        except BaseException:
            found = dict(error=traceback.format_exc())
        path.write_text(json.dumps(found))
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(path.read_text()) if path.exists() else dict(error="no answer")


def main(folder, *chosen):
    folder = Path(folder)
    os.chdir(folder)
    for name in {x.split(",")[0] for x in chosen or CASES}:
        if not Path(name).exists():
            tiny_models.make(name, name)
    import sglang.srt.entrypoints.engine

    import tilewise.integrations.sglang.backend  # noqa: F401

    cases = {name: run(folder, name) for name in chosen or CASES}
    (folder / "cases.json").write_text(json.dumps(dict(sglang=sglang.__version__, cases=cases)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
