"""What users call, until it is a `Problem`."""

from ..mods.flatten import check_block_mask, modifiers_of
from . import paths
from .fp8 import attend

paths.attend_fp8 = attend
paths.check_block_mask, paths.modifiers_of = check_block_mask, modifiers_of
