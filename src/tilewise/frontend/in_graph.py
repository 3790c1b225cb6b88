"""Tells Dynamo which functions are nodes of its graph. It is imported by what Dynamo traces, and by
nothing in eager mode, because it imports Dynamo.
"""

import torch

from .compiled import nodes

for node in nodes.values():
    torch.compiler.allow_in_graph(node)
