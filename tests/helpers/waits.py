"""Code that may not wait for a GPU."""

import contextlib
import warnings

import torch


@contextlib.contextmanager
def nothing_waits():
    """Raises where the host waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's: that the mode is a prototype
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
