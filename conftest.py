"""Which files `--doctest-modules` leaves out, and why."""

from importlib.util import find_spec

collect_ignore_glob = [
    "src/tilewise/integrations/hub_kernel/*",  # a second tilewise, which no process has beside one
    # Examples with another library's models want that library
    *(
        f"src/tilewise/integrations/{name}/*"
        for name in ("diffusers", "transformers")
        if find_spec(name) is None
    ),
]
