"""Entry points that serving engines load in each of their processes, whether or not tilewise is
asked for: so they import nothing of tilewise, and no error here stops an engine.
"""
