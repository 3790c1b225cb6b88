"""What users, the tour, the docs and the examples import stays where it is, whichever file it is
in.
"""

import importlib
import pkgutil

import pytest

import tilewise

DROP_IN = """flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func
    flash_attn_varlen_func flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func
    flex_attention"""
SCORES = "ScoreMod alibi relative_bias score softcapped"
PUBLIC = {
    "tilewise": f"""{DROP_IN} ArgumentError PerformanceWarning Quantized __version__ attention
        attention_reference batch_invariant cache disable_sdpa enable_sdpa flash_attn_combine
        flash_attn_with_kvcache merge_states quantize scaled_dot_product_attention""",
    "tilewise.faces": DROP_IN,
    "tilewise.cache": "Append Rotary append",
    "tilewise.bert_padding": """index_first_axis index_first_axis_residual index_put_first_axis
        pad_input unpad_input unpad_input_for_concatenated_sequences""",
    "tilewise.mods": f"""{SCORES} Mask causal chunked dilated document evaluate mask maximum minimum
        prefix_lm sliding_window tree where""",
    "tilewise.scores": f"{SCORES} ScoreFunction",
    "tilewise.sparse": "BlockLists BlockMask create_block_mask",
    "tilewise.reference": "attention_reference merge_states",
    "tilewise.distributed": """CacheShards ContextParallel Layout Plan PullTimeout RankLost
        RankMismatch Simulation attention context_parallel contiguous documents from_positions plan
        simulate striped zigzag""",
    "tilewise.errors": "ArgumentError PerformanceWarning",
    "tilewise.testing": """SMEM_LIMIT TARGETS build emulate emulator_seed interpret
        interpreter_is_on interpreting repair stats use_emulator use_interpreter""",
    "tilewise.testing.hopper": "Deadlock HopperError emulate",
    "tilewise.testing.schedule": "Run Tile busy key_blocks makespan simulate tiles",
    "tilewise.testing.tolerance": "Verdict assert_within judge",
    "tilewise.integrations.diffusers": "is_registered register",
    "tilewise.integrations.dtensor": "register",
    "tilewise.integrations.hub": "local_kernels",
    "tilewise.integrations.torch_sdpa": "disable_sdpa enable_sdpa",
    "tilewise.integrations.transformers": "check is_registered register",
    "tilewise.explain.lengths": "SETS",
    "benchmarks.bench.providers": "Attend Provider",
    "benchmarks.bench.standings": "summary",
    "tilewise.kernels.hopper.compat": "tma_load",
    "tilewise.kernels.portable.step": "attend",
    "tilewise.tile.softmax": "online_step",
    "tilewise.tile.varlen": "Hint varlen_tile",
}


NEEDS = {"tilewise.cli": "click"}
NEEDS |= {f"tilewise.integrations.{name}": name for name in ("diffusers", "transformers")}


def load(name: str):
    """The module; a skip where what it is for is not installed."""
    for start, needed in NEEDS.items():
        if name.startswith(start):
            pytest.importorskip(needed)
    return importlib.import_module(name)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_there(name):
    module = load(name)
    assert not [x for x in PUBLIC[name].split() if not hasattr(module, x)]


@pytest.mark.parametrize("name", PUBLIC)
def test_what_a_module_lists_is_public(name):
    assert set(getattr(load(name), "__all__", ())) <= set(PUBLIC[name].split())


@pytest.mark.parametrize("name", [name for name in PUBLIC if name.count(".") == 1])
def test_public_modules_are_found_and_say_what_they_are(name):
    found = {f"tilewise.{module.name}" for module in pkgutil.iter_modules(tilewise.__path__)}
    assert name in found
    assert load(name).__doc__
