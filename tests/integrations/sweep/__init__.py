"""Every class of transformers' mappings that builds tiny: tilewise beside eager, cell by cell.

    PYTHONPATH=src python -m tests.integrations.sweep            # what rows.jsonl lacks
    PYTHONPATH=src python -m tests.integrations.sweep --all     # all, in about ten minutes
    PYTHONPATH=src python -m tests.integrations.sweep --only LlamaForCausalLM BertForMaskedLM

`rows.jsonl` has a row a class; docs/transformers.md is generated from it.
"""
