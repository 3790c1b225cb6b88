"""tilewise as a hub kernel: the folder, its loaders, and the validators of its name."""

import copy
import importlib.util
import json

import pytest
import torch

import tilewise
from tilewise import ArgumentError
from tilewise.integrations import hub

AS_FLASH = "kernels-community/flash-attn2"
FUNCTIONS = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


@pytest.fixture
def local(monkeypatch):
    """The environment without LOCAL_KERNELS."""
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    monkeypatch.setenv("LOCAL_KERNELS", hub.local_kernels(hub.NAME, AS_FLASH))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def kernels_library():
    """The library; these tests have a folder of that name, too."""
    kernels = pytest.importorskip("kernels")
    if not hasattr(kernels, "get_local_kernel"):
        pytest.skip("needs the kernels library")
    return kernels


def test_the_folder_is_laid_out_as_kernels_are():
    metadata = json.loads((hub.FOLDER / "torch-universal" / "metadata.json").read_text())
    assert metadata.keys() >= {"name", "id", "version", "license", "python-depends", "backend"}
    source = hub.FOLDER / "torch-universal" / "__init__.py"
    spec = importlib.util.spec_from_file_location(metadata["id"], source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [getattr(module, name) for name in FUNCTIONS] == [
        getattr(tilewise, name) for name in FUNCTIONS
    ]


def test_says_which_names_stand_for_the_folder(monkeypatch):
    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    assert hub.local_kernels() == f"tilewise/attention={hub.FOLDER}"
    monkeypatch.setenv("LOCAL_KERNELS", f"a/b=/c:{AS_FLASH}=/d")
    assert hub.local_kernels(AS_FLASH) == f"a/b=/c:{AS_FLASH}={hub.FOLDER}"
    for name in ("attention", "a/b/c", "a/b=c", ""):
        with pytest.raises(ArgumentError, match="owner/name"):
            hub.local_kernels(name)


def test_the_command_says_it(monkeypatch):
    pytest.importorskip("rich")
    testing = pytest.importorskip("click.testing")
    from tilewise.cli.__main__ import main

    monkeypatch.delenv("LOCAL_KERNELS", raising=False)
    for names in ([], [AS_FLASH], [hub.NAME, AS_FLASH]):
        done = testing.CliRunner().invoke(main, ["hub", *names])
        assert (done.exit_code, done.output) == (0, hub.local_kernels(*names) + "\n")
    assert testing.CliRunner().invoke(main, ["hub", "attention"]).exit_code == 2


def test_the_library_loads_the_folder(local):
    kernels = kernels_library()
    of_folder = kernels.get_local_kernel(hub.FOLDER)
    loaded = [of_folder, *(kernels.get_kernel(x, version=1) for x in (hub.NAME, AS_FLASH))]
    for module in loaded:
        for name in FUNCTIONS:
            assert getattr(module, name) is getattr(tilewise, name)


SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
CONFIGS = {
    "llama": {},
    "mistral": dict(sliding_window=5),
    "gemma2": dict(head_dim=8, sliding_window=5, attn_logit_softcapping=2.0),
    "gpt_oss": dict(num_local_experts=2, num_experts_per_tok=1, head_dim=8, sliding_window=5),
}


@pytest.fixture
def transformers(local):
    kernels = kernels_library()
    transformers = pytest.importorskip("transformers")
    from transformers.utils.import_utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip(
            f"transformers {transformers.__version__} takes other versions of the kernels library "
            f"than {kernels.__version__}"
        )
    return transformers


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_computes_with_it(name, padding, transformers):
    config = transformers.AutoConfig.for_model(name, **SIZES, **CONFIGS[name])
    make = transformers.AutoModelForCausalLM.from_config
    eager = make(copy.deepcopy(config), attn_implementation="eager")
    ours = make(copy.deepcopy(config), attn_implementation=hub.NAME)
    for weight in (x for name, x in eager.named_parameters() if "sink" in name):
        torch.nn.init.normal_(weight)
    ours.load_state_dict(eager.state_dict())
    ids = torch.randint(3, 64, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, slice(0, 4) if padding == "left" else slice(8, None)] = int(padding == "none")
    real = mask.bool()
    found, expected = (model(ids, attention_mask=mask).logits[real] for model in (ours, eager))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    dout = torch.randn_like(expected)
    for out in (found, expected):
        out.backward(dout)
    for (name, x), y in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, atol=1e-4, rtol=1e-3, msg=name)


def test_transformers_falls_back_to_it_as_flash_attention_2(transformers):
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("flash-attn is here, and comes first")
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="flash_attention_2")
    assert model.config._attn_implementation == AS_FLASH
    assert model(torch.randint(3, 64, (2, 12))).logits.isfinite().all()


# stacks with lists of their own


def axolotl_config(**options):
    schemas = pytest.importorskip(
        "axolotl.utils.schemas.config", reason="needs Axolotl, which pins another transformers"
    )
    least = dict(base_model="a/b", micro_batch_size=1, gradient_accumulation_steps=1)
    least |= dict(learning_rate=1e-4, datasets=[dict(path="a", type="alpaca")])
    return schemas.AxolotlInputConfig(**least, **options)


def test_axolotl_takes_the_name():
    assert axolotl_config(attn_implementation=hub.NAME).attn_implementation == hub.NAME
    packing = axolotl_config(attn_implementation=AS_FLASH, sample_packing=True)
    assert packing.attn_supports_packing
    with pytest.raises(ValueError, match="hub-kernel"):
        axolotl_config(attn_implementation="tilewise")


def test_trls_command_line_takes_the_name():
    trl = pytest.importorskip("trl", reason="needs TRL")
    arguments = ["--model_name_or_path", "a/b", "--attn_implementation", hub.NAME]
    parsed, *_ = trl.TrlParser((trl.ModelConfig,)).parse_args_and_config(arguments)
    assert parsed.attn_implementation == hub.NAME
