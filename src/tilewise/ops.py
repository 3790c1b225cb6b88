"""The two operators, forward and backward, and the way a call takes to them.

In eager mode with plain tensors a call goes straight to the backend (with autograd: through one
`autograd.Function`), because the dispatcher costs more than a decode step can spare. Where somebody
watches or rewrites the call (torch.compile, export, a dispatch mode such as FlopCounterMode or
selective checkpointing, a tensor subclass such as FakeTensor or DTensor), it goes through
`torch.ops.tilewise.forward` and `.backward`, whose schemas carry the Problem's fields as scalars.
"""

from __future__ import annotations

import sys

import torch
from torch.autograd import forward_ad

from . import batching, dispatch
from .kernels.arguments import aligned
from .kernels.outputs import empty_grads, empty_out
from .problem import Call, Extras, Grads, Problem, Scalars, describe, extras_of

Tensor = torch.Tensor

EXTRAS = len(Extras._fields)
TENSORS = 3 + EXTRAS  # q, k, v and the optional ones
SAVED = 7 + EXTRAS  # what the backward takes: dout, dlse, q, k, v, out, lse and those
_CALL = (
    ", ".join(f"Tensor? {name}" for name in Extras._fields)
    + ", float scale, float softcap, SymInt left, SymInt right, str align, bool deterministic, "
    "str? backend"
)
_library = torch.library.Library("tilewise", "DEF")
_library.define(f"forward(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor)")
_library.define(
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_CALL})"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


# the call


def attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras, watched: bool
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a checked call, differentiable in q, k, v and sinks; `watched` is what
    `is_watched` said of its tensors.
    """
    if not (watched and torch.compiler.is_compiling()) and _is_transformed():
        return _Attention.apply(q, k, v, *extras, call.problem, call.scalars, call.backend)
    if watched:
        _register_late()
        flags = (*call.scalars, *_flags(call.problem), call.backend)
        return torch.ops.tilewise.forward(q, k, v, *extras, *flags)
    if needs_grad(q, k, v, extras.sinks):
        return _EagerAttention.apply(q, k, v, *extras, call)
    return _run_forward(call, q, k, v, extras)


def _run_forward(call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras):
    """The call on a backend; what memory it comes in is known only here, not while tracing."""
    on_16_bytes = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0
    if call.forward is not None and on_16_bytes:
        return call.forward(q, k, v, extras)
    problem = call.problem
    is_aligned = aligned(q) and aligned(k) and aligned(v)
    chosen = dispatch.choose(problem, q.device, call.backend, is_aligned)
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


def _flags(problem: Problem) -> tuple[str, bool]:
    return problem.align, problem.deterministic


# autograd


def _save(
    ctx, tensors: tuple, output: tuple, problem: Problem, scalars: Scalars, backend: str | None
) -> None:
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)
    ctx.problem, ctx.scalars, ctx.backend = problem, scalars, backend


def _backward(ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and the extras."""
    if dout is None and dlse is None:
        return (None,) * TENSORS
    q, k, v, *extras, out, lse = ctx.saved_tensors
    extras = Extras(*extras)
    if dout is None:  # only the gradient of lse is asked
        dout = torch.zeros_like(out)
    tensors = (dout, dlse, q, k, v, out, lse, *extras)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # create_graph or a functorch transform: the gradients are to be differentiated in turn.
        grads = _AttentionBackward.apply(*tensors, ctx.problem, ctx.scalars, ctx.backend)
    else:
        grads = _AttentionBackward.forward(*tensors, ctx.problem, ctx.scalars, ctx.backend)
    dq, dk, dv, dsinks = grads
    of_extras = Extras(sinks=None if extras.sinks is None else dsinks)
    return dq, dk, dv, *of_extras


def _run_backward(problem, dout, dlse, q, k, v, out, lse, extras, scalars, backend) -> Grads:
    is_aligned = aligned(q) and aligned(k) and aligned(v)
    chosen = dispatch.choose(problem, q.device, backend, is_aligned)
    return chosen.backward(problem, dout, dlse, q, k, v, out, lse, extras, scalars)


class _EagerAttention(torch.autograd.Function):
    """Eager autograd without the dispatcher.

    A Function with a setup_context would serve transforms too, but its `apply` reads the signature
    of `forward` at every call: 75 us of a short one.
    """

    @staticmethod
    def forward(ctx, q, k, v, *rest):
        *tensors, call = rest
        extras = extras_of(*tensors)
        output = _run_forward(call, q, k, v, extras)
        _save(ctx, (q, k, v, *extras), output, call.problem, call.scalars, call.backend)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        return *_backward(ctx, dout, dlse), None


class _Attention(torch.autograd.Function):
    """What functorch transforms and forward-mode AD see."""

    @staticmethod
    def forward(q, k, v, *rest):
        *extras, problem, scalars, backend = rest
        _register_late()
        return torch.ops.tilewise.forward(q, k, v, *extras, *scalars, *_flags(problem), backend)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, problem, scalars, backend = inputs
        _save(ctx, tuple(tensors), output, problem, scalars, backend)

    @staticmethod
    def backward(ctx, dout, dlse):
        return *_backward(ctx, dout, dlse), None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "attention has no forward-mode derivative: use tilewise.attention_reference, or "
            "reverse mode (torch.func.vjp, jacrev)"
        )

    @staticmethod
    def vmap(info, in_dims, *args):
        attend = batching.with_last(_Attention.apply, args[TENSORS:])
        return batching.forward(attend, info.batch_size, in_dims[:TENSORS], args[:TENSORS])


class _AttentionBackward(torch.autograd.Function):
    """The backward, which has no derivative and says so."""

    @staticmethod
    def forward(dout, dlse, q, k, v, out, lse, *rest):
        *extras, problem, scalars, backend = rest
        extras = Extras(*extras)
        if is_watched(dout, dlse, q, k, v) or _is_transformed():
            _register_late()
            call = (*extras, *scalars, *_flags(problem), backend)
            return torch.ops.tilewise.backward(dout, dlse, q, k, v, out, lse, *call)
        grads = _run_backward(problem, dout, dlse, q, k, v, out, lse, extras, scalars, backend)
        return *grads[:3], q.new_empty(0) if extras.sinks is None else grads.dsinks

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        _no_double_backward(ctx, *grads)

    @staticmethod
    def jvp(ctx, *tangents):
        _no_double_backward(ctx, *tangents)

    @staticmethod
    def vmap(info, in_dims, *args):
        differentiate = batching.with_last(_AttentionBackward.apply, args[SAVED:])
        return batching.one_by_one(differentiate, info.batch_size, in_dims[:SAVED], args[:SAVED])


def _setup_context(ctx, inputs, output):
    problem, _, scalars = _asked(inputs[:TENSORS], inputs[TENSORS:])
    _save(ctx, inputs[:TENSORS], output, problem, scalars, inputs[-1])


def _op_backward(ctx, dout, dlse):
    return *_backward(ctx, dout, dlse), *(None,) * 7


def _no_double_backward(ctx, *grads):
    raise NotImplementedError(
        "attention is differentiable once: for a second derivative use tilewise.attention_reference"
    )


# the operators


def _asked(tensors: tuple, call: tuple) -> tuple[Problem, Extras, Scalars]:
    """What an operator's arguments ask for: `call` begins at scale, after the extras."""
    q, k, v, *extras = tensors
    extras, scalars = Extras(*extras), Scalars(*call[:4])
    return describe(q, k, v, extras, scalars, *call[4:6]), extras, scalars


def _forward_kernel(q, k, v, *args):
    problem, extras, scalars = _asked((q, k, v, *args[:EXTRAS]), args[EXTRAS:])
    return _run_forward(Call(problem, scalars, args[-1]), q, k, v, extras)


def _backward_kernel(dout, dlse, q, k, v, out, lse, *args):
    problem, extras, scalars = _asked((q, k, v, *args[:EXTRAS]), args[EXTRAS:])
    grads = _run_backward(problem, dout, dlse, q, k, v, out, lse, extras, scalars, args[-1])
    return *grads[:3], q.new_empty(0) if grads.dsinks is None else grads.dsinks


def _forward_fake(q, k, v, *args):
    return empty_out(_asked((q, k, v, *args[:EXTRAS]), args[EXTRAS:])[0], q)


def _backward_fake(dout, dlse, q, k, v, out, lse, alibi_slopes, sinks, *rest):
    grads = empty_grads(q, k, v, sinks)
    return *grads[:3], q.new_empty(0) if sinks is None else grads.dsinks


def _vmap_forward_op(info, in_dims, *args):
    tensors, call = args[:TENSORS], args[TENSORS:]
    attend = batching.with_last(torch.ops.tilewise.forward, call)
    return batching.forward(attend, info.batch_size, in_dims[:TENSORS], tensors)


def _vmap_backward_op(info, in_dims, *args):
    tensors, call = args[:SAVED], args[SAVED:]
    differentiate = batching.with_last(torch.ops.tilewise.backward, call)
    return batching.one_by_one(differentiate, info.batch_size, in_dims[:SAVED], tensors)


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
            return torch.ops.tilewise.forward(q, k, v, *rest)

    _library.impl("forward", forward, key)


_library.impl("forward", _forward_kernel, "CompositeExplicitAutograd")
_library.impl("backward", _backward_kernel, "CompositeExplicitAutograd")
_autocast_rule("AutocastCPU")
_autocast_rule("AutocastCUDA")
torch.library.register_fake("tilewise::forward", _forward_fake, lib=_library)
torch.library.register_fake("tilewise::backward", _backward_fake, lib=_library)
torch.library.register_autograd(
    "tilewise::forward", _op_backward, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("tilewise::backward", _no_double_backward, lib=_library)
torch.library.register_vmap("tilewise::forward", _vmap_forward_op, lib=_library)
torch.library.register_vmap("tilewise::backward", _vmap_backward_op, lib=_library)


# registered when somebody has loaded what needs it


def _register_late() -> None:
    """The FLOP formulas and the DTensor rules, once their modules are loaded: importing those costs
    more than all of tilewise.
    """
    if not _late["flops"] and "torch.utils.flop_counter" in sys.modules:
        _late["flops"] = True
        from . import flops

        flops.register(torch.ops.tilewise.forward, torch.ops.tilewise.backward)
    if not _late["dtensor"] and "torch.distributed.tensor" in sys.modules:
        _late["dtensor"] = True
        from .integrations import dtensor

        dtensor.register()


# What torch.compiler.assume_constant_result sets, but its import is torch._dynamo's. Dynamo, which
# cannot trace a registration, then runs it while it traces.
_register_late._dynamo_marked_constant = True
_late = {"flops": False, "dtensor": False}
_register_late()
