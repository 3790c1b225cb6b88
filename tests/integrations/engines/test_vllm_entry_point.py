"""vLLM's entry point in processes of their own: what it imports and registers."""

import subprocess
import sys
from pathlib import Path

import tilewise

SOURCE = Path(tilewise.__file__).parents[1]
REGISTRY = """
from enum import Enum
OVERRIDES = {TAKEN}
class AttentionBackendEnum(Enum):
    CPU_ATTN = "cpu"
    CUSTOM = None
    def is_overridden(self): return self.name in OVERRIDES
    def get_path(self): return OVERRIDES.get(self.name, self.value)
def register_backend(backend, path):
    OVERRIDES[backend if isinstance(backend, str) else backend.name] = path
"""
PROGRAM = """
import sys
before = set(sys.modules)
from tilewise_plugins.vllm import register
register()
register()
added = {name.split(".")[0] for name in set(sys.modules) - before}
assert not {"torch", "tilewise"} & set(sys.modules)
from vllm.v1.attention.backends import registry
print(sorted(added - set(sys.stdlib_module_names)), registry.OVERRIDES)
print(sorted(registry.AttentionBackendEnum.__members__))
"""
PATH = "tilewise.integrations.vllm.backend.TilewiseBackend"


def registered(folder, taken="{}", registry=REGISTRY, **environment):
    """What a process without tilewise and torch prints that loads the plug-in."""
    package = folder / "vllm" / "v1" / "attention" / "backends"
    package.mkdir(parents=True)
    (package / "registry.py").write_text(registry.replace("{TAKEN}", taken))
    paths = f"{folder}:{SOURCE}"
    run = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM],
        env=dict(PYTHONPATH=paths, **environment),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines(), run.stderr


def test_the_entry_point_imports_nothing_but_vllms_registry(tmp_path):
    (first, second), _ = registered(tmp_path)
    assert first == f"['tilewise_plugins', 'vllm'] {{'CUSTOM': '{PATH}'}}"
    assert second == "['CPU_ATTN', 'CUSTOM', 'TILEWISE']"


def test_cpus_take_the_place_of_vllms_own_backend_on_request(tmp_path):
    (first, _), _ = registered(tmp_path, TILEWISE_VLLM_CPU="1")
    assert first.endswith(f"{{'CUSTOM': '{PATH}', 'CPU_ATTN': '{PATH}'}}")


def test_another_plugin_keeps_custom(tmp_path):
    (first, _), _ = registered(tmp_path, taken="{'CUSTOM': 'theirs'}")
    assert first.endswith(f"{{'CUSTOM': 'theirs', 'TILEWISE': '{PATH}'}}")


def test_an_unknown_registry_is_a_line_in_the_log(tmp_path):
    registry = "OVERRIDES = {}\nclass AttentionBackendEnum: __members__ = {}"
    (first, _), said = registered(tmp_path, registry=registry)
    assert first.endswith("{}")
    assert "tilewise is not among the attention backends of this vLLM: ImportError" in said
