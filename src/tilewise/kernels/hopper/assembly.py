"""What the assembly that forward and backward share means to the emulator."""

import torch

from . import bias, dependents, hide, rescale, row_max

ASM = {"tanh.approx.f32 $0, $1;": torch.tanh, **bias.ASM, **dependents.ASM, **hide.ASM}
ASM |= {**rescale.ASM, **row_max.ASM}
