"""What the assembly that forward and backward share means to the emulator."""

import torch

from . import bias, hide, rescale, row_max

ASM = {"tanh.approx.f32 $0, $1;": torch.tanh, **bias.ASM, **hide.ASM, **rescale.ASM, **row_max.ASM}
