"""Programs: all launches of a call, planned once, and run for the tensors of each call.

A launch is data: a kernel, how many programs, arguments by name, constants and compiler options.
Tensors among the arguments are operands, which have names and no memory. So the same launch is run
by Triton's front end at the first call, by the interpreter, by the offline compiler, and, past
Triton, at all later calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

from ...emulation import cpu_modes, interpret
from ...tuning.select import overrides
from .alignment import ALIGNMENT
from .building import first_launch, on_device, side_by_side
from .direct import Relaunch, may_relaunch, past_triton, relaunch_of
from .operand import Gap, Operand, Provided, Within, filled, gaps_in, operands_of
from .packed import flat
from .workspace import Workspace, allocator_of, starts_of, tensors_of

Tensor = torch.Tensor


class Launch(NamedTuple):
    """One kernel on a grid."""

    kernel: Any
    programs: int
    args: dict[str, Any]  # by the names of the kernel's parameters, and in their order
    constants: dict[str, Any]  # parameters that are constexpr
    options: dict[str, Any]  # of the compiler, such as num_warps

    is_guarded = True  # whether the interpreter refuses addresses outside of its tensors

    @property
    def positional(self) -> tuple:
        """All arguments as a compiled kernel takes them."""
        return *self.args.values(), *self.constants.values()

    @property
    def settings(self) -> dict[str, Any]:
        """What the compiler reads: constants, options, and that a product and a sum are rounded
        once, which Triton 3.10 turns off.
        """
        return dict(enable_fp_fusion=True) | self.constants | self.options

    def filled(self, values: Mapping[str, Any]) -> list[Any]:
        """The arguments of the tensors of these names, as Triton's front end takes them."""
        return [filled(x, values) for x in self.args.values()]

    def start(self, values: dict[str, Any], device: torch.device) -> Any:
        """Launches through Triton's front end, of the tensors of these names. Returns the compiled
        kernel, or None where the interpreter ran it.
        """
        args = self.filled(values)
        if device.type == "cpu" and any(cpu_modes()):
            kernel = interpret(self.kernel, check=self.is_guarded)
            first_launch(kernel, self.programs, args, without_assembly(self.constants))
            return None
        return first_launch(self.kernel, self.programs, args, self.settings)

    def compilation(self, values: dict[str, Any]) -> Callable[[], Any]:
        """A function that compiles the kernel for tensors of these names, and launches nothing."""
        args = self.filled(values)
        return functools.partial(self.kernel.warmup, *args, grid=(self.programs,), **self.settings)

    def relaunch_of(self, compiled: Any, values: dict[str, Any]) -> Relaunch | None:
        """A launch of the compiled kernel as a function of a stream and of a row of addresses, in
        the order of these tensors, of which it was launched first; None where there is no way.
        """
        kinds = flat(tuple(compiled.src.signature.values()), iter(self.positional))
        if any(kind == "constexpr" and isinstance(x, Gap) for kind, x in kinds):
            return None  # the code has a number of one call: `lengths` does not reach this Triton
        return relaunch_of(past_triton(compiled, self.programs), self.positional, [*values])


def without_assembly(constants: dict[str, Any]) -> dict[str, Any]:
    """Constants with which a kernel has no instruction of GPUs."""
    features = constants.get("FEATURES")
    if "IS_EARLY" in constants:  # launches follow each other
        constants = constants | dict(IS_EARLY=False)
    if not getattr(features, "FAST_TANH", False):
        return constants
    return constants | dict(FEATURES=features._replace(FAST_TANH=False))


def checked(launch: Launch) -> Launch:
    """The launch, if its arguments are the kernel's parameters in their order."""
    parameters = getattr(launch.kernel, "arg_names", None)
    names = [*launch.args, *launch.constants]
    if parameters is not None and names != list(parameters):
        raise TypeError(f"{launch.kernel.__name__} has parameters {parameters}, not {names}")
    return launch


class TorchStep(NamedTuple):
    """What torch does between launches, with tensors of these names."""

    function: Callable[..., None]
    names: tuple[str, ...]


class Mark(NamedTuple):
    """A place between launches, where a caller may launch something of its own."""

    function: Callable[[Any, tuple[Any, ...]], None]  # of what the caller passed, and the outputs


Step = Launch | TorchStep | Mark


class Program:
    """The launches of all calls of one signature. Holds no tensor.

    `names` are those of the tensors that each call passes, in this order. Each call makes the
    `outputs` and returns them, None in the place of those that are None.
    """

    def __init__(
        self,
        names: Sequence[str],
        steps: Sequence[Step],
        workspace: Workspace,
        outputs: Sequence[Operand | None] = (),
    ) -> None:
        self.device = workspace.device
        self.steps = [x for x in steps if not isinstance(x, Launch) or x.programs]
        # What each call makes: tensors, as a view of a buffer takes torch longer, then buffers
        of_torch = {name for x in self.steps if isinstance(x, TorchStep) for name in x.names}
        in_buffers = [x for x in workspace.slices if x.name not in of_torch]
        self.slices = [x for x in in_buffers if not x.is_cleared]
        self.zeros = [x for x in in_buffers if x.is_cleared]
        *self.starts, self.size = starts_of(self.slices)
        *self.zero_starts, self.zero_size = starts_of(self.zeros)
        apart = (x for x in workspace.slices if x.name in of_torch)
        self.made = [*(x for x in outputs if x is not None), *apart]
        empty = allocator_of(self.device)
        self.makers = [
            functools.partial(empty, tuple(x.shape), x.strides, x.dtype) for x in self.made
        ]
        self.new_buffer, self.new_zeros = (
            functools.partial(empty, (size,), (1,), torch.uint8)
            for size in (self.size, self.zero_size)
        )
        self.cleared = [place for place, x in enumerate(self.made) if x.is_cleared]
        self.returned = [None if x is None else self.made.index(x) for x in outputs]
        gaps = (x for launch in self.launches for x in gaps_in(launch.positional))
        self.provided = [*{x.name: x for x in gaps if isinstance(x, Provided)}.values()]
        self.has_all = None not in self.returned
        in_row = *self.made, *self.slices, *self.zeros, *self.provided
        self.names = [*names, *(x.name for x in in_row)]
        self.copied = self._copied()
        # Whether addresses are all that it is launched by
        self.takes_addresses = not self.copied and len(self.launches) == len(self.steps)
        self.index: int | None = None  # of the device for which the kernels are compiled
        self.again: list[Relaunch | TorchStep | Mark] | None = None
        self.needs_scratch = False

    @property
    def launches(self) -> list[Launch]:
        """The launches alone."""
        return [x for x in self.steps if isinstance(x, Launch)]

    def __call__(self, tensors: Sequence[Any], between: Any = None) -> tuple[Any, ...]:
        """Runs the program for tensors in the order of its names. Returns its outputs. `between` is
        for the functions of its marks.
        """
        if self.copied:
            tensors = list(tensors)
            for place in self.copied:
                tensors[place] = tensors[place].contiguous()
        again = self.again
        if again is None or not may_relaunch(self.index):
            return self._start(tensors, between)
        new_tensors = [make() for make in self.makers]
        for place in self.cleared:
            new_tensors[place].zero_()
        tensors = *tensors, *new_tensors
        row = [0 if x is None else x.data_ptr() for x in tensors]
        if self.starts:
            buffer = self.new_buffer()  # held until all is launched
            base = buffer.data_ptr()
            row += [base + start for start in self.starts]
        if self.zero_starts:
            zeros = self.new_zeros().zero_()
            base = zeros.data_ptr()
            row += [base + start for start in self.zero_starts]
        if self.needs_scratch:
            triton.set_allocator(scratch)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        provided = []  # held until all is launched
        for x in self.provided:
            provided.append(tensor := x.get(self.device, self.index, stream))
            row.append(tensor.data_ptr())
        outputs = tuple(new_tensors[: len(self.returned)])
        if not self.has_all:
            outputs = tuple([None if n is None else new_tensors[n] for n in self.returned])
        for step in again:
            kind = type(step)
            if kind is TorchStep:
                step.function(*[tensors[self.names.index(x)] for x in step.names])
            elif kind is not Mark:
                step(stream, row)
            elif between is not None:
                step.function(between, outputs)
        return outputs

    def run(self, values: Sequence[Tensor | int]) -> None:
        """Runs it for tensors, and numbers in the place of others, in the order of its names."""
        row = [x if type(x) is int else x.data_ptr() for x in values]
        if not self.again_at(row):
            self._start(values, None)

    def again_at(self, row: Sequence[Any]) -> bool:
        """Launches it by the addresses of all in the order of its names but what it provides;
        whether that could be done.
        """
        if self.again is None or not may_relaunch(self.index):
            return False
        self.launch(torch._C._cuda_getCurrentRawStream(self.index), row)
        return True

    def launch(self, stream: int, row: Sequence[Any]) -> None:
        """Launches it by addresses, on a stream of the current device."""
        if self.provided:
            provided = [x.get(self.device, self.index, stream) for x in self.provided]  # held
            row = [*row, *[x.data_ptr() for x in provided]]
        for step in self.again:
            step(stream, row)

    def _start(self, tensors: Sequence[Any], between: Any) -> tuple[Any, ...]:
        """Runs the program by Triton's front end, which compiles the kernels, and keeps how it is
        run again. On CPU tensors the interpreter runs it.
        """
        compiled = []
        with on_device(self.device):
            new_tensors = [x.new() for x in self.made]
            values = dict(zip(self.names, (*tensors, *new_tensors)))
            values |= tensors_of(self.slices, self.device) | tensors_of(self.zeros, self.device)
            values |= self._provided()
            triton.set_allocator(scratch)  # per thread: autograd's backward runs in its own
            outputs = tuple(None if n is None else new_tensors[n] for n in self.returned)
            if self.device.type == "cuda" and self.again is None and len(self.launches) > 1:
                side_by_side([x.compilation(values) for x in self.launches], self.device)
            for step in self.steps:
                if isinstance(step, TorchStep):
                    step.function(*[values[name] for name in step.names])
                elif isinstance(step, Launch):
                    compiled.append(step.start(values, self.device))
                elif between is not None:
                    step.function(between, outputs)
        is_on_gpu = self.device.type != "cpu" or compiled  # fakes are compiled for a CPU
        may_keep = self.again is None and is_on_gpu and None not in compiled
        if may_keep and torch.version.hip is None:
            self._keep(iter(compiled), values)
        return outputs

    def _provided(self) -> dict[str, Tensor]:
        """What the program gets itself, by name."""
        index, stream = None, 0
        if self.provided and self.device.type != "cpu":
            index = torch.cuda.current_device()
            stream = torch._C._cuda_getCurrentRawStream(index)
        return {x.name: x.get(self.device, index, stream) for x in self.provided}

    def _keep(self, compiled: Iterator[Any], values: dict[str, Any]) -> None:
        """Keeps how the compiled kernels are launched past Triton, unless one cannot be."""
        again: list[Relaunch | TorchStep | Mark] = []
        for step in self.steps:
            if not isinstance(step, Launch):
                again.append(step)
                continue
            kernel = next(compiled)
            # For descriptors that a kernel makes, Triton's launcher allocates memory
            metadata = getattr(kernel, "metadata", None)
            self.needs_scratch |= bool(getattr(metadata, "global_scratch_size", 1))
            if (relaunch := step.relaunch_of(kernel, values)) is None:
                return
            again.append(relaunch)
        self.index = self.device.index  # before `again`, which another thread may see
        self.again = again

    def _copied(self) -> list[int]:
        """Which tensors each call makes contiguous."""
        is_copied: dict[str, bool] = {}
        for launch in self.launches:
            for x in gaps_in(launch.positional):
                if not isinstance(x, Operand):
                    continue
                if is_copied.setdefault(x.name, x.is_copied) != x.is_copied:
                    raise TypeError(f"{x.name} and a copy of it are arguments of one program")
        return [place for place, name in enumerate(self.names) if is_copied.get(name)]


class Planned:
    """Calls of one signature: the first plans a program, which later ones run.

    `fields` are the names of their tensors, as `operands_of` takes them, and `plan` makes the
    program of operands by these names.
    """

    def __init__(self, fields: Sequence[str], plan: Callable[..., Program]) -> None:
        self.fields, self.plan = fields, plan
        self.program: Program | None = None

    def __call__(self, tensors: Sequence[Tensor | None], between: Any = None) -> tuple[Any, ...]:
        """The outputs of the program for tensors in the order of the fields."""
        program = self.program
        if program is not None and not overrides:
            return program(tensors, between)
        program = self.plan(**operands_of(self.fields, tensors))
        outputs = program(tensors, between)
        # On CPU tensors calls of one signature may differ in strides: see `ops.run_backward`
        is_kept = program.again is not None or program.device.type != "cpu"
        self.program = program if is_kept and not overrides else None
        return outputs

    def again_at(self, row: Sequence[int]) -> bool:
        """Launches a program that makes no tensor by the addresses of its fields, 0 for None;
        whether that could be done.
        """
        program = self.program
        if program is None or overrides or program.needs_scratch or not program.takes_addresses:
            return False
        return program.again_at(row)


def fake_args(launch: Launch) -> list[Any]:
    """The arguments as an offline compiler takes them: empty CPU tensors for operands."""
    gaps = [*gaps_in(launch.positional)]
    names = (x.base if isinstance(x, Within) else x.name for x in gaps)
    return launch.filled(dict(zip(names, map(fake_tensor, gaps))))


def fake_tensor(operand: Operand | Provided | Within) -> Tensor:
    """An empty tensor of the dtype and alignment of an operand."""
    if isinstance(operand, Within):
        return torch.empty(operand.start + 64, dtype=operand.dtype)
    if isinstance(operand, Provided):
        return operand.get(torch.device("cpu"), None, 0)
    memory = torch.empty(64, dtype=operand.dtype)
    return memory[1:] if operand.address % ALIGNMENT else memory


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory for the descriptors that kernels make."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
