"""Compile a kernel for a GPU that is not there, and read what the compiler made of it.

`build` goes through Triton's own launch path with a fake driver, so types, alignment and
specialization come from ordinary arguments, as in a real launch. `stats` reads the result:
registers, spills, shared memory, and whether wgmma was serialized, which only ptxas's log tells.

Shared memory over a GPU's limit is no error here: compare with `SMEM_LIMIT`. A Gluon kernel for
Hopper must not be built for another target: the compiler aborts the process.
"""

import contextlib
import io
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from ..hardware import SHARED_MEMORY

TARGETS: dict[str, GPUTarget] = {
    **{f"sm{n}": GPUTarget("cuda", n, 32) for n in (80, 89, 90, 100, 120)},
    **{arch: GPUTarget("hip", arch, 64) for arch in ("gfx942", "gfx950")},
}

# Bytes of shared memory one program may use
SMEM_LIMIT: dict[str, int] = {target: SHARED_MEMORY[target] for target in TARGETS}

# Instructions whose presence or absence decides a kernel's speed.
_SASS = (
    *("HGMMA", "QGMMA", "HMMA", "UTCHMMA", "UTMALDG", "LDL", "STL"),
    *("MUFU.EX2", "FFMA", "FSEL", "PRMT"),
)
_AMD = ("vgpr_count", "agpr_count", "vgpr_spill_count", "sgpr_spill_count")

_one_at_a_time = threading.RLock()


def build(kernel: Any, *args: Any, on: str = "sm90", **meta: Any) -> Any:
    """Compiles a `@triton.jit` or `@gluon.jit` kernel for a GPU that need not be present.

    Example:
        >>> import torch, triton, triton.language as tl
        >>> @triton.jit
        ... def double_kernel(x, BLOCK: tl.constexpr):
        ...     offs = tl.arange(0, BLOCK)
        ...     tl.store(x + offs, 2 * tl.load(x + offs))
        >>> compiled = build(double_kernel, torch.empty(64), on="sm90", BLOCK=64)
        >>> stats(compiled)["spill_stores"]
        0

    Args:
        kernel: the kernel.
        args: those of a launch: CPU tensors (or torch dtypes) for pointers, host descriptors over
            CPU tensors, numbers, and tuples or NamedTuples of them.
        on: a key of `TARGETS`.
        meta: constexprs and options of a launch.

    Returns:
        Triton's compiled kernel, with `asm`, `metadata` and, for NVIDIA targets, `ptxas_log`.

    Raises:
        ValueError: an unknown target. Compile errors are Triton's.
    """
    if on not in TARGETS:
        raise ValueError(f"no target {on!r}; known are {', '.join(TARGETS)}")
    log = io.StringIO()
    with _targeting(TARGETS[on]), contextlib.redirect_stdout(log):
        compiled = kernel.warmup(*args, grid=(1,), **meta)
        if hasattr(compiled, "result"):
            compiled = compiled.result()
    # A kernel keeps what it compiled: asked again, it answers without a log.
    if not hasattr(compiled, "ptxas_log"):
        compiled.ptxas_log = log.getvalue()
    return compiled


def stats(compiled: Any) -> dict[str, int | bool]:
    """Resources and instruction counts of a kernel from `build`.

    Example:
        >>> import torch, triton, triton.language as tl
        >>> @triton.jit
        ... def copy_kernel(x, y):
        ...     tl.store(y, tl.load(x))
        >>> stats(build(copy_kernel, torch.empty(1), torch.empty(1)))  # doctest: +ELLIPSIS
        {'smem': 0, 'warps': 4, 'registers': ..., 'spill_stores': 0, 'spill_loads': 0, ...}

    Args:
        compiled: what `build` returned.

    Returns:
        `smem` in bytes and `warps`. For NVIDIA `registers` per thread, `spill_stores` and
        `spill_loads` in bytes, `wgmma_serialized`, counts of instructions (HGMMA, QGMMA, HMMA,
        UTCHMMA, UTMALDG, LDL, STL, MUFU.EX2, FFMA, FSEL, PRMT), `copies_apart` (TMA loads where a
        warp's lanes may have diverged, as lanes that run ahead read data that has not landed), and
        `idle_barriers`
        (mbarriers that are created and not used, whose memory is reused). For AMD `vgpr_count`,
        `agpr_count`, `vgpr_spill_count`, `sgpr_spill_count` and `MFMA`.

    Raises:
        ValueError: the kernel was not compiled by `build`.
    """
    resources = {"smem": compiled.metadata.shared, "warps": compiled.metadata.num_warps}
    if "amdgcn" in compiled.asm:
        assembly = compiled.asm["amdgcn"]
        counts = {name: _number(rf"\.{name}:\s*(\d+)", assembly) for name in _AMD}
        return resources | counts | {"MFMA": assembly.count("v_mfma")}
    log = getattr(compiled, "ptxas_log", "")
    resources |= {
        "registers": _number(r"Used (\d+) registers", log),
        "spill_stores": _number(r"(\d+) bytes spill stores", log),
        "spill_loads": _number(r"(\d+) bytes spill loads", log),
        "wgmma_serialized": "are serialized" in log,
    }
    sass = _disassemble(compiled.asm["cubin"])
    resources["copies_apart"] = _copies_apart(sass)
    resources["idle_barriers"] = _idle_barriers(compiled.asm["ttgir"])
    return resources | {name: len(re.findall(rf"(?<![.\w]){name}\b", sass)) for name in _SASS}


class _StandIn(DriverBase):
    """The part of a driver that compilation uses."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    @classmethod
    def is_active(cls) -> Any:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> str:
        # The key under which a kernel keeps what it compiled; a real device is a number.
        return f"offline {self.target.backend} {self.target.arch}"

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("a kernel compiled offline has no device")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("a kernel compiled offline cannot be timed")


@contextlib.contextmanager
def _targeting(target: GPUTarget) -> Iterator[None]:
    driver = triton.runtime.driver
    nvidia, compilation = knobs.nvidia, knobs.compilation
    with _one_at_a_time, nvidia.scope(), compilation.scope():
        # ptxas speaks only when it runs, so no cached kernel will do.
        nvidia.dump_ptxas_log = compilation.always_compile = True
        active, driver._active = driver._active, _StandIn(target)
        try:
            yield
        finally:
            driver._active = active


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if not match:
        raise ValueError(f"nothing matches {pattern!r}: was this kernel compiled by `build`?")
    return int(match[1])


def _copies_apart(sass: str) -> int:
    """TMA loads where lanes may have parted: between a branch behind a BSSY and its end."""
    apart = 0
    for named in re.finditer(r"\bBSSY\b.*?`\((\.\w+)\)", sass):
        meeting = sass.index(f"\n{named[1]}:")
        _, branch, parted = sass[named.end() : meeting].partition("BRA")
        apart += parted.count("UTMALDG") if branch else 0
    return apart


def _idle_barriers(ttgir: str) -> int:
    """Arrays of mbarriers that are made, and nothing more.

    The compiler reuses their memory, which PTX allows only after `mbarrier.inval`: after a context
    switch to another process the GPU restores the barriers' first state, over the new contents.
    """
    arrays = re.findall(r"(%\w+) = ttg.local_alloc : \(\) -> !ttg.memdesc<(?:\d+x)*1xi64", ttgir)
    idle = 0
    for name in arrays:
        parts = re.findall(rf"(%\w+) = ttg.memdesc_index {name}\[", ttgir)
        uses = sum(len(re.findall(rf"{x}\b(?! =)", ttgir)) for x in (name, *parts))
        starts = sum(len(re.findall(rf"init_barrier {x}\b", ttgir)) for x in (name, *parts))
        idle += uses == starts + len(parts)
    return idle


def _disassemble(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
