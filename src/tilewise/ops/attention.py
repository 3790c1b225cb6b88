"""The two operators, forward and backward, and the way a call takes to them.

In eager mode with plain tensors a call goes straight to the backend (with autograd: through one
`autograd.Function`), because the dispatcher costs more than a decode step can spare. Where somebody
watches or rewrites the call (torch.compile, export, a dispatch mode such as FlopCounterMode or
selective checkpointing, a tensor subclass such as FakeTensor or DTensor), it goes through
`torch.ops.tilewise.flash_attn_forward` and `.flash_attn_backward`, whose schemas carry the
Problem's fields as scalars. Selective checkpointing by name looks for `flash_attn`.
"""

from __future__ import annotations

import functools
import sys

import torch
from torch.autograd import forward_ad

from .. import dispatch
from ..kernels.common.outputs import empty_grads, empty_out
from ..mods.flatten import mentions
from ..problem import OPTIONAL, Call, Extras, Grads, Saved, extras_of
from . import captured_grads
from . import vmap as batching
from .context_parallel import refuse_shards
from .schema import (
    CALL,
    GIVEN,
    INPUTS,
    LIBRARY,
    SAVED,
    Once,
    Options,
    asked,
    flat,
    no_double_backward,
    options_of,
    parts_of,
)

Tensor = torch.Tensor

LIBRARY.define(f"flash_attn_forward(Tensor q, Tensor k, Tensor v, {CALL}) -> (Tensor, Tensor)")
LIBRARY.define(f"flash_attn_backward({SAVED}, {CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")


# the call


def attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras, watched: bool
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a checked call, differentiable in all that is learned; `watched` is
    what `is_watched` said of its tensors.
    """
    if not (watched and torch.compiler.is_compiling()) and _is_transformed():
        return _Attention.apply(call, q, k, v, *extras.tensors)
    if watched:
        _register_late()
        return torch.ops.tilewise.flash_attn_forward(q, k, v, *extras.arguments, *options_of(call))
    if needs_grad(q, k, v, extras.sinks, extras.bias, *extras.captured):
        return _EagerAttention.apply(call, q, k, v, *extras.tensors)
    return _run_forward(call, q, k, v, extras)


def _run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras):
    """The call on a backend, where no sequences are shards."""
    refuse_shards()
    return run_forward(call, q, k, v, extras)


def run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras):
    """The call on a backend; what memory it comes in is known only here, not while tracing."""
    on_16_bytes = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    if call.forward is not None and on_16_bytes:
        return call.forward(q, k, v, extras)
    problem = call.problem
    if q.is_meta:
        return empty_out(problem, q)
    chosen = dispatch.choose_for(problem, q, k, v, extras, call.backend)
    if on_16_bytes and q.is_cuda and hasattr(chosen, "prepare"):
        call.forward = chosen.prepare(problem, call.scalars, q, k, v)
        return call.forward(q, k, v, extras)
    return chosen.forward(problem, q, k, v, extras, call.scalars)


def is_watched(*tensors: Tensor | None) -> bool:
    """Whether something above us must see an operator: a compiler, a dispatch mode, or a tensor
    subclass.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return True
    for t in tensors:  # a loop costs half of any() over a generator
        if type(t) not in _PLAIN:
            return True
    return False


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of any of these."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, type(None)}


def _is_transformed() -> bool:
    """Inside vmap, grad or another functorch transform, or under forward-mode AD (which our
    Function refuses by name).
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


# autograd


def _save(ctx, call: Call, tensors: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)
    ctx.call = call


def _backward(
    ctx, dout: Tensor | None, dlse: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the extras; `needs` says which captured tensors want one."""
    out, lse, q, k, v, *tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (INPUTS + len(tensors))
    if dout is None:  # only the gradient of lse is asked
        dout = torch.zeros_like(out)
    if torch._C._functorch.is_legacy_batchedtensor(dout):
        raise NotImplementedError(
            "is_grads_batched or vectorize=True: torch's old vmap cannot map attention's backward; "
            "use torch.func.jacrev, or torch.func.vmap of torch.func.vjp"
        )
    saved = Saved(dout, dlse, q, k, v, out, lse)
    given = (ctx.call, *saved, *tensors)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # create_graph or a functorch transform: the gradients are to be differentiated in turn.
        grads = _AttentionBackward.apply(*given)
    else:
        grads = _AttentionBackward.forward(*given)
    dq, dk, dv, dsinks, dbias = grads
    extras = extras_of(*tensors)
    of_extras = Extras(
        sinks=None if extras.sinks is None else dsinks,
        bias=dbias if ctx.call.problem.has_bias_grad else None,
        captured=captured_grads.gradients(ctx.call, needs, saved, extras),
    )
    return dq, dk, dv, *of_extras.tensors


def run_backward(call: Call, saved: Saved, extras: Extras) -> Grads:
    """The gradients on a backend."""
    q, k, v = saved.q, saved.k, saved.v
    if q.is_meta:
        return empty_grads(call.problem, q, k, v, extras)
    chosen = dispatch.choose_for(call.problem, q, k, v, extras, call.backend)
    return chosen.backward(call.problem, saved, extras, call.scalars)


class _EagerAttention(torch.autograd.Function):
    """Eager autograd without the dispatcher.

    A Function with a setup_context would serve transforms too, but its `apply` reads the signature
    of `forward` at every call: 75 us of a short one.
    """

    @staticmethod
    def forward(ctx, call, q, k, v, *tensors):
        output = _run_forward(call, q, k, v, extras_of(*tensors))
        _save(ctx, call, (q, k, v, *tensors), output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        return None, *_backward(ctx, dout, dlse, ctx.needs_input_grad[1 + INPUTS + OPTIONAL :])


class _Attention(torch.autograd.Function):
    """What functorch transforms and forward-mode AD see."""

    @staticmethod
    def forward(call, q, k, v, *tensors):
        _register_late()
        return torch.ops.tilewise.flash_attn_forward(
            q, k, v, *extras_of(*tensors).arguments, *options_of(call)
        )

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, *tensors = inputs
        _save(ctx, call, tuple(tensors), output)

    @staticmethod
    def backward(ctx, dout, dlse):
        return None, *_backward(ctx, dout, dlse, ctx.needs_input_grad[1 + INPUTS + OPTIONAL :])

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "attention has no forward-mode derivative: use tilewise.attention_reference, or "
            "reverse mode (torch.func.vjp, jacrev)"
        )

    @staticmethod
    def vmap(info, in_dims, call, *tensors):
        attend = functools.partial(_Attention.apply, call)
        counts_rows = "b" in mentions(call.problem.mods)
        return batching.forward(attend, counts_rows, info.batch_size, in_dims[1:], tensors)


class _AttentionBackward(Once):
    """The backward."""

    @staticmethod
    def forward(call, *tensors):
        saved, extras = Saved(*tensors[:GIVEN]), extras_of(*tensors[GIVEN:])
        if is_watched(*saved[:5]) or _is_transformed():
            _register_late()
            given = *saved, *extras.arguments
            return torch.ops.tilewise.flash_attn_backward(*given, *options_of(call))
        return _filled(run_backward(call, saved, extras), saved.q)

    @staticmethod
    def vmap(info, in_dims, call, *tensors):
        differentiate = functools.partial(_AttentionBackward.apply, call)
        return batching.one_by_one(differentiate, info.batch_size, in_dims[1:], tensors)


def gradients(call: Call, saved: Saved, extras: Extras) -> tuple[Tensor, ...]:
    """Those of q, k and v, of what the caller has kept."""
    return _AttentionBackward.forward(call, *saved, *extras.tensors)[:INPUTS]


def _filled(grads: Grads, q: Tensor) -> tuple[Tensor, ...]:
    """The gradients as an operator returns them: empty where nobody asked."""
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def _setup_context(ctx, inputs, output):
    _save(ctx, _call_of(*parts_of(inputs, INPUTS)), flat(inputs, INPUTS)[0], output)


def _op_backward(ctx, dout, dlse):
    captured = INPUTS + OPTIONAL
    needs = ctx.needs_input_grad[captured]  # of a list a list, of None False
    is_list = isinstance(needs, (list, tuple))
    grads = _backward(ctx, dout, dlse, needs if is_list else ())
    of_captured = list(grads[captured:]) if is_list else None
    return *grads[:captured], of_captured, *(None,) * len(Options._fields)


# the operators


@functools.lru_cache(maxsize=4096)
def _known_call(*asked) -> Call:
    return Call(*asked[:3])


def known_call(call: tuple, tensors: tuple) -> Call:
    """One call for all that looks the same: what is compiled passes no door that would keep it.
    `call` is problem, scalars and backend; `tensors` are q, k, v and the extras'.
    """
    looks = [None if x is None else (x.shape, x.dtype, x.device) for x in tensors]
    return _known_call(*call, *looks, *[x.stride() for x in tensors[:INPUTS]])


def _call_of(inputs: tuple, extras: Extras, options: Options) -> Call:
    """The call that an operator's arguments ask for; `inputs` are q, k and v."""
    return Call(asked(*inputs, extras, options), options.scalars, options.backend)


def _forward_kernel(*args):
    inputs, extras, options = parts_of(args, INPUTS)
    call, tensors = _call_of(inputs, extras, options), (*inputs, *extras.tensors)
    if not is_watched(*tensors):
        call = known_call((call.problem, call.scalars, call.backend), tensors)
    return _run_forward(call, *inputs, extras)


def _backward_kernel(*args):
    tensors, extras, options = parts_of(args, GIVEN)
    saved = Saved(*tensors)
    call = _call_of((saved.q, saved.k, saved.v), extras, options)
    return _filled(run_backward(call, saved, extras), saved.q)


def _forward_fake(*args):
    inputs, extras, options = parts_of(args, INPUTS)
    return empty_out(asked(*inputs, extras, options), inputs[0])


def _backward_fake(*args):
    tensors, extras, options = parts_of(args, GIVEN)
    inputs = tensors[2 : 2 + INPUTS]
    return _filled(empty_grads(asked(*inputs, extras, options), *inputs, extras), inputs[0])


def _vmap_forward_op(info, in_dims, *args):
    tensors, rest = flat(args, INPUTS)

    def attend(*tensors):
        extras = extras_of(*tensors[INPUTS:])
        return torch.ops.tilewise.flash_attn_forward(*tensors[:INPUTS], *extras.arguments, *rest)

    counts_rows = "b" in mentions(Options(*rest).mods)
    return batching.forward(attend, counts_rows, info.batch_size, flat(in_dims, INPUTS)[0], tensors)


def _vmap_backward_op(info, in_dims, *args):
    tensors, rest = flat(args, GIVEN)

    def differentiate(*tensors):
        extras = extras_of(*tensors[GIVEN:])
        return torch.ops.tilewise.flash_attn_backward(*tensors[:GIVEN], *extras.arguments, *rest)

    return batching.one_by_one(differentiate, info.batch_size, flat(in_dims, GIVEN)[0], tensors)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the autocast dtype where autocast is on (fp64 stays, as in torch)."""
    device = q.device.type
    if device not in ("cpu", "cuda") and not torch.amp.is_autocast_available(device):
        return q, k, v  # torch raises where a device, meta among them, knows no autocast
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = (
            t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t
            for t in (q, k, v)
        )
    return q, k, v


def _autocast_rule(key: str):
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
        torch._C.DispatchKey.AutocastCUDA
    )

    def forward(q, k, v, *rest):
        q, k, v = autocast(q, k, v)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return torch.ops.tilewise.flash_attn_forward(q, k, v, *rest)

    LIBRARY.impl("flash_attn_forward", forward, key)


LIBRARY.impl("flash_attn_forward", _forward_kernel, "CompositeExplicitAutograd")
LIBRARY.impl("flash_attn_backward", _backward_kernel, "CompositeExplicitAutograd")
_autocast_rule("AutocastCPU")
_autocast_rule("AutocastCUDA")
torch.library.register_fake("tilewise::flash_attn_forward", _forward_fake, lib=LIBRARY)
torch.library.register_fake("tilewise::flash_attn_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd(
    "tilewise::flash_attn_forward", _op_backward, setup_context=_setup_context, lib=LIBRARY
)
torch.library.register_autograd("tilewise::flash_attn_backward", no_double_backward, lib=LIBRARY)
torch.library.register_vmap("tilewise::flash_attn_forward", _vmap_forward_op, lib=LIBRARY)
torch.library.register_vmap("tilewise::flash_attn_backward", _vmap_backward_op, lib=LIBRARY)


# registered when somebody has loaded what needs it


def _register_late() -> None:
    """The FLOP formulas and the DTensor rules, once their modules are loaded: importing those costs
    more than all of tilewise.
    """
    if not _late["flops"] and "torch.utils.flop_counter" in sys.modules:
        _late["flops"] = True
        from . import flops

        flops.register(torch.ops.tilewise)
    if not _late["dtensor"] and "torch.distributed.tensor" in sys.modules:
        _late["dtensor"] = True
        from . import sharding

        sharding.register()


# What torch.compiler.assume_constant_result sets, but its import is torch._dynamo's. Dynamo, which
# cannot trace a registration, then runs it while it traces.
_register_late._dynamo_marked_constant = True
_late = {"flops": False, "dtensor": False}
_register_late()
