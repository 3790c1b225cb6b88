"""Which files `--doctest-modules` leaves out, and why."""

from importlib.util import find_spec

# Files of those who have the library
NEED = {
    "src/tilewise/cli/*": "click",
    "benchmarks/*": "click",
    "tests/benchmarks/*": "click",
    "examples/*": "click",
    "src/tilewise/integrations/diffusers/*": "diffusers",
    "src/tilewise/integrations/sglang/*": "sglang",
    "src/tilewise/integrations/transformers/*": "transformers",
    "src/tilewise/integrations/vllm/*": "vllm",
    "tests/integrations/sweep/*": "transformers",
}

collect_ignore_glob = [
    "src/tilewise/bench.py",  # raises an error, to say where it is now
    "src/tilewise/integrations/hub_kernel/*",  # a second tilewise, which no process has beside one
    "tests/engines/*_cases.py",  # programs of the engines' environments
    "tests/engines/*_classes.py",
    "tests/engines/sglang_names/*",
    "tests/engines/tiny_models.py",
    *(files for files, library in NEED.items() if find_spec(library) is None),
]
