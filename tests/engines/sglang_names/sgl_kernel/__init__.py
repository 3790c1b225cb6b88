"""SGLang's compiled kernels by name: none is called where this stands in, except those of
`speculative`, which are written out.
"""

from . import speculative


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args, **options):
        raise AssertionError(f"sgl_kernel.{name} is a name without a kernel")

    return getattr(speculative, name, refuse)
