"""Tiny random models of diffusers, with tilewise and with torch's attention."""

import copy
import enum

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch as dispatch  # noqa: E402

from tilewise import ArgumentError  # noqa: E402
from tilewise.integrations import diffusers as integration  # noqa: E402

ROPE = dict(axes_dims_rope=(4, 6, 6))
HEADS = dict(num_attention_heads=2, attention_head_dim=16)
TEXT, SIDE, BATCH = 7, 4, 2  # tokens of text, and of a side of the image


def flux():
    model = diffusers.FluxTransformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, joint_attention_dim=24, **HEADS, **ROPE,
        pooled_projection_dim=16,
    )  # fmt: skip
    return (
        model,
        2,
        dict(
            hidden_states=torch.randn(BATCH, SIDE**2, 8),
            encoder_hidden_states=torch.randn(BATCH, TEXT, 24),
            pooled_projections=torch.randn(BATCH, 16),
            timestep=torch.rand(BATCH),
            img_ids=torch.cartesian_prod(*map(torch.arange, (1, SIDE, SIDE))),
            txt_ids=torch.zeros(TEXT, 3),
        ),
    )


def wan():
    model = diffusers.WanTransformer3DModel(
        in_channels=4, out_channels=4, text_dim=24, freq_dim=16, ffn_dim=32, num_layers=1, **HEADS
    )
    return (
        model,
        2,
        dict(
            hidden_states=torch.randn(BATCH, 4, 2, 2 * SIDE, 2 * SIDE),
            encoder_hidden_states=torch.randn(BATCH, TEXT, 24),
            timestep=torch.randint(0, 1000, (BATCH,)),
        ),
    )


def qwen(mask=None):
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=1, joint_attention_dim=24, **HEADS, **ROPE
    )
    return (
        model,
        1,
        dict(
            hidden_states=torch.randn(BATCH, SIDE**2, 16),
            encoder_hidden_states=torch.randn(BATCH, TEXT, 24),
            encoder_hidden_states_mask=mask,
            timestep=torch.rand(BATCH),
            img_shapes=[[(1, SIDE, SIDE)]] * BATCH,
        ),
    )


def qwen_padded():
    """A row of text that ends early; the image stands behind it."""
    return qwen(torch.arange(TEXT) < torch.tensor([[TEXT], [3]]))


MODELS = [flux, wan, qwen, qwen_padded]


@pytest.fixture(autouse=True)
def registered():
    """The backend of the process is diffusers' own again after each test."""
    integration.register()
    before = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(before)


def pair(make):
    """One set of weights, twice: with torch's attention and with tilewise."""
    native, calls, inputs = make()
    ours = copy.deepcopy(native)
    native.set_attention_backend("native")
    ours.set_attention_backend("tilewise")
    return native, ours, calls, inputs


def counted(monkeypatch):
    """The calls that reach tilewise."""
    calls, attend = [], integration.attend

    def attend_counted(*args, **kwargs):
        calls.append(args)
        return attend(*args, **kwargs)

    monkeypatch.setattr(integration, "attend", attend_counted)
    return calls


@pytest.mark.parametrize("make", MODELS)
def test_outputs_and_gradients_are_those_of_torchs_attention(make, monkeypatch):
    native, ours, expected_calls, inputs = pair(make)
    calls = counted(monkeypatch)
    expected = native(**inputs, return_dict=False)[0]
    assert not calls
    found = ours(**inputs, return_dict=False)[0]
    assert len(calls) == expected_calls
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    dout = torch.randn_like(expected)
    pairs = []
    for model, out in ((native, expected), (ours, found)):
        out.backward(dout)
        pairs.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    assert pairs[0].keys() == pairs[1].keys()
    for name, grad in pairs[0].items():
        torch.testing.assert_close(pairs[1][name], grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("make", [flux, qwen_padded])
def test_compiles_in_one_graph(make):
    _, ours, _, inputs = pair(make)
    expected = ours(**inputs, return_dict=False)[0]
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs, return_dict=False)[0], expected)


def test_registering_again_changes_nothing():
    names, table = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    before = list(names), dict(table._backends), list(names.__members__)
    integration.register()
    assert (list(names), dict(table._backends), list(names.__members__)) == before
    assert integration.is_registered()


def test_is_a_backend_like_the_others():
    names = dispatch.AttentionBackendName
    member = names("tilewise")
    assert member is names.TILEWISE is names["TILEWISE"] and member in names and member in [*names]
    assert (member.name, member.value, str(member)) == ("TILEWISE", "tilewise", str(member))
    assert copy.deepcopy(member) is member
    assert member in dispatch._AttentionBackendRegistry.list_backends()
    with dispatch.attention_backend("tilewise"):
        q = torch.randn(1, 5, 2, 8)
        torch.testing.assert_close(
            dispatch.dispatch_attention_fn(q, q, q), integration.attention_forward(q, q, q)
        )
        assert dispatch._AttentionBackendRegistry.get_active_backend()[0] is member


def test_gives_what_diffusers_asks_by_name():
    q = torch.randn(1, 5, 2, 8)
    asked = dict(backend=dispatch.AttentionBackendName("tilewise"), scale=0.5)
    out, lse = dispatch.dispatch_attention_fn(
        q, q, q, **asked, attention_kwargs=dict(return_lse=True)
    )
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    with pytest.raises(ArgumentError, match="enable_gqa"):
        dispatch.dispatch_attention_fn(q, q[:, :, :1].repeat(1, 1, 3, 1), q, **asked)


# another diffusers


def forget(monkeypatch):
    table = dispatch._AttentionBackendRegistry
    others = {name: f for name, f in table._backends.items() if name != "tilewise"}
    monkeypatch.setattr(table, "_backends", others)
    assert not integration.is_registered()


def test_this_version_is_one_of_those_tested():
    assert ".".join(diffusers.__version__.split(".")[:2]) in integration.TESTED


def test_an_untested_version_is_refused_by_name(monkeypatch):
    forget(monkeypatch)
    monkeypatch.setattr(diffusers, "__version__", "0.99.1")
    with pytest.raises(NotImplementedError, match=r"diffusers 0\.99\.1.*untested=True"):
        integration.register()
    assert not integration.is_registered()


def names_of(*values):
    """The enum of a diffusers to come."""
    return enum.StrEnum("AttentionBackendName", {x.upper(): x for x in values})


def test_an_untested_version_may_be_tried(monkeypatch):
    class Registry(dispatch._AttentionBackendRegistry):
        _backends: dict = {}  # noqa: RUF012
        _constraints: dict = {}  # noqa: RUF012
        _supported_arg_names: dict = {}  # noqa: RUF012
        _supports_context_parallel: set = set()  # noqa: RUF012

    names = names_of("native")
    monkeypatch.setattr(diffusers, "__version__", "0.99.1")
    monkeypatch.setattr(dispatch, "_AttentionBackendRegistry", Registry)
    monkeypatch.setattr(dispatch, "AttentionBackendName", names)
    assert not integration.is_registered()
    integration.register(untested=True)
    assert integration.is_registered() and [x.value for x in names] == ["native", "tilewise"]
    assert Registry._supports_context_parallel == {"tilewise"}


@pytest.mark.parametrize("change", ["enum", "registry", "register", "name"])
def test_a_table_that_changed_is_refused_by_name(change, monkeypatch):
    forget(monkeypatch)

    class Registry:
        _backends: dict = {}  # noqa: RUF012

        def register(backend):
            raise AssertionError("it takes other arguments")

    enums = {"enum": str, "register": names_of("native"), "name": names_of("tilewise")}
    if change == "registry":
        monkeypatch.delattr(dispatch, "_AttentionBackendRegistry")
    else:
        monkeypatch.setattr(dispatch, "AttentionBackendName", enums[change])
    if change == "register":
        monkeypatch.setattr(dispatch, "_AttentionBackendRegistry", Registry)
    with pytest.raises(NotImplementedError, match="its table of backends is not the one of"):
        integration.register()
    assert not integration.is_registered() and [*enums["register"]] == ["native"]
