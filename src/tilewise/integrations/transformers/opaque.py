"""A placeholder for a tensor that refuses to be used as one.

transformers passes a model's mask to its layers, and most of them pass it on to the attention
function. Some models compute with it themselves. There a mask that is no tensor must neither be
taken for something else nor end in an error about types, so every use of it is refused by one
sentence that names the way out.
"""

from __future__ import annotations

ANOTHER = "load the model with attn_implementation='sdpa' or 'eager'"
UNARY = "abs bool float index int invert iter len neg pos reversed"
BINARY = "add and floordiv matmul mod mul or pow rshift lshift sub truediv xor"
COMPARED = "eq ne lt le gt ge contains getitem setitem delitem array"
IN_PLACE = "iadd iand imul ior isub itruediv"
OPERATORS = [*UNARY.split(), *BINARY.split(), *COMPARED.split(), *IN_PLACE.split()]
OPERATORS += [f"r{name}" for name in BINARY.split()]


class MaskError(NotImplementedError, AttributeError):
    """The mask is no tensor. An AttributeError as well, so that `hasattr` answers: accelerate's
    hooks ask each argument of a layer whether it has a `to`.
    """


class NoTensor:
    """Refuses every operator, attribute and function of a tensor with a MaskError.

    >>> NoTensor() + 1  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    tilewise.integrations.transformers.opaque.MaskError: attention_mask.__add__: this model...
    """

    def __getattr__(self, name: str):
        raise _refusal(name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise _refusal(getattr(func, "__name__", str(func)))

    __hash__ = object.__hash__


def _refusal(name: str) -> MaskError:
    return MaskError(
        f"attention_mask.{name}: this model computes with its attention mask itself, and "
        f"tilewise's is a description of one and no tensor; {ANOTHER}"
    )


def _refusing(name: str):
    def refuse(self, *args):
        raise _refusal(name)

    return refuse


for _name in OPERATORS:
    setattr(NoTensor, f"__{_name}__", _refusing(f"__{_name}__"))
