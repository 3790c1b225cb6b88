"""Backwards of one call."""


def gradients_of(launch, problem, saved, extras, scalars):
    """Its gradients, by the kernels of a launch module."""
    return launch.prepare_backward(problem, scalars)(saved, extras)
