"""Triton, or a stand-in that lets kernel modules be imported without it.

Owns: the only import of Triton. Every kernel module says `from nanovllm.kernels._triton import tl, triton`. Invariant:
importing a kernel module never needs Triton, launching a kernel always does. The stand-in deliberately emulates
nothing: a machine without Triton runs the torch references.
"""

from __future__ import annotations

from typing import Any, NoReturn


class _MissingKernel:
    """What `triton.jit` makes of a function where there is no Triton: it says so when launched."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: Any) -> NoReturn:
        raise RuntimeError(f"kernel {self.name} needs the package triton, which is not installed")

    __call__ = __getitem__


class _MissingTriton:
    """Decorators and constants that run when a module is imported; nothing else."""

    @staticmethod
    def jit(fn: Any = None, **options: Any) -> Any:
        return (lambda f: _MissingKernel(f.__name__)) if fn is None else _MissingKernel(fn.__name__)

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    def __getattr__(self, name: str) -> Any:  # tl.float32 and the like, at module level
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def _import_triton() -> tuple[Any, Any, bool]:
    try:
        import triton
        import triton.language
    except ImportError:
        return _MissingTriton(), _MissingTriton(), False
    return triton, triton.language, True


triton, tl, HAS_TRITON = _import_triton()
