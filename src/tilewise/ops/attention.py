"""How a call reaches a backend, and its gradients.

In eager mode with plain tensors a call goes straight to the backend (with autograd: through one
`autograd.Function`), because the dispatcher costs more than a decode step can spare. Where the call
is traced or intercepted (torch.compile, export, a dispatch mode such as FlopCounterMode or
selective checkpointing, a tensor subclass such as FakeTensor or DTensor), it goes through
`torch.ops.tilewise.flash_attn_forward` and `.flash_attn_backward`, whose schemas carry the
Problem's fields as scalars. Selective checkpointing by name looks for `flash_attn`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

from .. import dispatch
from ..emulation import cpu_modes
from ..kernels.common.alignment import check_elements
from ..kernels.common.outputs import empty_grads, empty_out
from ..problem import INPUTS, NO_EXTRAS, OPTIONAL, Between, Call, Extras, Grads, Saved, extras_of
from . import late
from .autocast import autocast as autocast
from .calls import UNGUARDED, Entry, eager_apply, entry_of, has_lazy, layout_key, resolved
from .calls import needs_dispatcher as needs_dispatcher
from .calls import needs_grad as needs_grad
from .context_parallel import refuse_shards
from .guards import guard_of, known_guards, remember
from .schema import SAVED_TENSORS, Once, apply, arguments_of

Tensor = torch.Tensor

# the call


def attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras, is_dispatched: bool
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a checked call, differentiable in all inputs that require grad;
    `is_dispatched` is what `needs_dispatcher` returned.
    """
    if _is_transformed() and (late.wants_gradient() or not torch.compiler.is_dynamo_compiling()):
        return apply(Attention, call, (q, k, v, *extras.tensors))
    if is_dispatched:
        late.register_late()
        return torch.ops.tilewise.flash_attn_forward(q, k, v, **arguments_of(call, extras))
    return launch(call, q, k, v, extras)


def launch(call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
    """Launches without the dispatcher."""
    if call.needs_grad:
        tensors = () if extras is NO_EXTRAS else extras.tensors
        return _apply_eagerly(call, q, k, v, *tensors)
    refuse_shards()
    return run_forward(call, q, k=k, v=v, extras=extras)


def run_forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras
) -> tuple[Tensor, Tensor]:
    """The call on a backend; what memory it comes in is known only here, not while tracing."""
    if call.forward is None:
        call.forward = _prepared(call, q, k=k, v=v, extras=extras)
    return call.forward(q, k, v, extras)


def _prepared(call: Call, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Callable:
    problem = call.problem
    if q.is_meta:
        return lambda q, k, v, extras: empty_out(q, problem.headdim_v)
    return dispatch.forward_of(call, q, k, v, extras)


def _is_transformed() -> bool:
    """Inside vmap, grad or another functorch transform, or under forward-mode AD (which our
    Function refuses by name).
    """
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# autograd


def save(ctx: Any, call: Call, tensors: tuple, output: tuple) -> None:
    """Keeps what a backward reads."""
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)
    ctx.call = call


def _backward(ctx: Any, *grads_of_outputs: Any) -> tuple[Tensor | None, ...]:
    """Gradients of the call, which has none, of q, k, v and the extras."""
    dout, dlse = grads_of_outputs
    out, lse, q, k, v, *tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (1 + INPUTS + len(tensors))
    if dout is None:  # only the gradient of lse is requested
        dout = torch.zeros_like(out)
    call, saved = ctx.call, Saved(dout, dlse, q=q, k=k, v=v, out=out, lse=lse)
    if not tensors and (prepared := recalled_backward(call, saved)) is not None:
        grads = prepared(saved, NO_EXTRAS)
        return None, grads.dq, grads.dk, grads.dv
    is_seen = _is_transformed() or is_legacy_batchedtensor(dout)
    if not (torch.is_grad_enabled() or is_seen or needs_dispatcher((dout, dlse, q, k, v))):
        grads = run_backward(call, saved, extras=extras_of(tensors))
        if not tensors:
            return None, grads.dq, grads.dk, grads.dv
    else:
        grads = differentiated(call, saved, extras=extras_of(tensors))
    needs = ctx.needs_input_grad[1 + INPUTS + OPTIONAL :]
    return None, *of_inputs(call, grads, saved=saved, extras=extras_of(tensors), needs=needs)


def differentiated(call: Call, saved: Saved, extras: Extras) -> Grads:
    """The gradients through the dispatcher."""
    if is_legacy_batchedtensor(saved.dout):
        raise NotImplementedError(
            "is_grads_batched or vectorize=True: torch's old vmap cannot map attention's backward; "
            "use torch.func.jacrev, or torch.func.vmap of torch.func.vjp"
        )
    if torch.is_grad_enabled() and (_is_transformed() or not torch.compiler.is_compiling()):
        # create_graph or a functorch transform: the gradients are to be differentiated in turn.
        return Grads._make(apply(AttentionBackward, call, (*saved, *extras.tensors)))
    return Grads._make(_backward_of(call, saved, extras=extras))


def of_inputs(
    call: Call, grads: Grads, saved: Saved, extras: Extras, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the extras; `needs` says which captured tensors want one."""
    captured = late.captured_gradients(call, needs, saved, extras) if extras.captured else ()
    return *grads[:INPUTS], *of_optional(call, grads, extras=extras), *captured


def of_optional(call: Call, grads: Grads, extras: Extras) -> list[Tensor | None]:
    """The gradients of the optional tensors, None for those without."""
    names = dict(zip(Grads._fields[INPUTS:], grads[INPUTS:]))
    if not call.problem.has_bias_grad:
        names["dbias"] = None
    pairs = zip(Extras._fields, extras.optional)
    return [None if x is None else names.get(f"d{name}") for name, x in pairs]


def recalled_backward(call: Call, saved: Saved) -> Callable[..., Grads] | None:
    """The newest backward, if it was of tensors like these, and no mode or transform sees them."""
    recall, _ = call.newest
    if recall is None or saved.dlse is not None or torch.is_grad_enabled():
        return None
    if torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0:
        return None
    recalled = recall(saved)
    return recalled and recalled[0].call


def run_backward(call: Call, saved: Saved, extras: Extras, between: Between | None = None) -> Grads:
    """The gradients on a backend."""
    q, k, v = saved.q, saved.k, saved.v
    if q.is_meta:
        return empty_grads(call.problem, q, k=k, v=v, extras=extras)
    if has_lazy(saved[:2]):
        saved = Saved._make(resolved(saved))
    if q.is_cpu:
        key = cpu_modes()
    else:
        key = layout_key(saved if extras is NO_EXTRAS else (*saved, *extras.tensors))
    prepared = call.backwards.get(key)
    if prepared is None:
        check_elements(zip(Saved._fields, saved))
        prepared = dispatch.backward_of(call, q, k, v, extras)
        for old in list(call.backwards)[: 1 - LOOKS]:
            call.backwards.pop(old, None)
        call.backwards[key] = prepared
        call.newest = None, None
    if extras is NO_EXTRAS and saved.dlse is call.newest[0] is None:
        if q.device.type not in UNGUARDED:
            entry = Entry()
            entry.call = prepared
            call.newest = guard_of(saved, entry), entry
    return prepared(saved, extras, between)


LOOKS = 8  # of one call, whose backwards are kept: a model has one or two


class _EagerAttention(torch.autograd.Function):
    """Eager autograd without the dispatcher.

    A Function with a setup_context would serve transforms too, but its `apply` reads the signature
    of `forward` at every call: 75 us of a short one.
    """

    @staticmethod
    def forward(ctx, call, q, k, v, *tensors):
        refuse_shards()
        output = run_forward(call, q, k=k, v=v, extras=extras_of(tensors))
        save(ctx, call, tensors=(q, k, v, *tensors), output=output)
        return output

    backward = staticmethod(_backward)


_apply_eagerly = eager_apply(_EagerAttention)


class Attention(torch.autograd.Function):
    """What functorch transforms and forward-mode AD see."""

    @staticmethod
    def forward(call, q, k, v, *tensors):
        late.register_late()
        arguments = arguments_of(call, extras_of(tensors))
        return torch.ops.tilewise.flash_attn_forward(q, k, v, **arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        call, *tensors = inputs
        save(ctx, call, tensors=tuple(tensors), output=output)

    backward = staticmethod(_backward)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            "attention has no forward-mode derivative: use tilewise.attention_reference, or "
            "reverse mode (torch.func.vjp, jacrev)"
        )


class AttentionBackward(Once):
    """The backward."""

    @staticmethod
    def forward(call, *tensors):
        saved, extras = Saved._make(tensors[:SAVED_TENSORS]), extras_of(tensors[SAVED_TENSORS:])
        return _backward_of(call, saved, extras=extras)


def _backward_of(call: Call, saved: Saved, extras: Extras) -> tuple[Tensor, ...]:
    if needs_dispatcher(saved[:5]) or _is_transformed():
        late.register_late()
        arguments = {**saved._asdict(), **arguments_of(call, extras)}
        return torch.ops.tilewise.flash_attn_backward(**arguments)
    return filled(run_backward(call, saved, extras=extras), saved.q)


def gradients(call: Call, saved: Saved, extras: Extras) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, from what the caller has kept."""
    return _backward_of(call, saved, extras=extras)[:INPUTS]


def filled(grads: Grads, q: Tensor) -> tuple[Tensor, ...]:
    """The gradients as an operator returns them: empty where none was requested."""
    return tuple(q.new_empty(0) if grad is None else grad for grad in grads)


def known_call(call: Call, tensors: tuple[Tensor | None, ...]) -> Call:
    """The cached call of this signature."""
    if needs_dispatcher(tensors):
        return call
    return known(tensors, (call.problem, call.scalars, call.backend), make=lambda: call)


def known(tensors: tuple[Tensor | None, ...], key: Hashable, make: Callable[[], Any]) -> Any:
    """The call that is cached for a signature, or one that is made for it; not to be traced."""
    first = tensors[0]
    if first is None:
        return make()
    guarded = key, first.numel(), torch.is_grad_enabled(), tuple(map(type, tensors))
    recall = known_guards.get(guarded)
    if recall is not None and (recalled := recall(tensors)) is not None:
        return recalled[0].call
    if needs_dispatcher(tensors) or (entry := entry_of(tensors, key)) is None:
        return make()
    if entry.call is None:
        entry.call = make()
    if first.device.type not in UNGUARDED:
        remember(guarded, tensors, entry=entry)
    return entry.call
