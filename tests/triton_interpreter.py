"""Keep Triton's interpreter from computing the same things again in each operation.

It patches triton.language at each call of a device function, though the kernel that calls it has
patched it, and derives the names and shapes of types again for each intermediate tensor. That took
half of the time of the interpreted tests. The results are the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def remember_types() -> None:
    """Speed up the interpreter of this process, unless Triton's version lacks what this patches.

    A second call does nothing.
    """
    needed = ("GridExecutor", "_LangPatchScope", "_patch_lang", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in needed):
        return
    if getattr(interpreter, "_remembers_types", False):
        return
    interpreter._remembers_types = True
    _patch_once_a_kernel()
    _remember_numpy_types()
    _remember_attributes(tl.core.block_type, _block_key, varying=())
    _remember_attributes(tl.core.tensor, _tensor_key, varying=("handle", "type"))


def _patch_once_a_kernel() -> None:
    """Let a device function patch triton.language only if its kernel has not done so."""
    patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[Any] = set()
    running: list[Any] = []

    def run(self: Any, *args: Any, **named: Any) -> Any:
        patched.clear()
        running.append(self)
        try:
            return call(self, *args, **named)
        finally:
            running.pop()
            patched.clear()

    def patch_once(function: Any) -> Any:
        values = function.__globals__.values()
        languages = tuple(lang for lang in (tl, tl.core) if any(lang is v for v in values))
        if running and languages and languages in patched:
            return interpreter._LangPatchScope()
        patched.add(languages)
        return patch(function)

    interpreter.GridExecutor.__call__ = run
    interpreter._patch_lang = patch_once


def _remember_numpy_types() -> None:
    find = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def find_once(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = find(dtype)
        return found

    interpreter._get_np_dtype = find_once


def _block_key(element: Any, shape: Any) -> tuple:
    return element.name, tuple([getattr(length, "value", length) for length in shape])


def _tensor_key(_handle: Any, dtype: Any) -> str:
    return dtype.name


def _remember_attributes(cls: type, key_of: Callable[..., Any], varying: tuple[str, ...]) -> None:
    """Initialize equal objects from the attributes of the first, but for the varying arguments."""
    initialize = cls.__init__  # type: ignore[misc]
    known: dict[Any, dict[str, Any]] = {}

    def initialize_again(self: Any, *args: Any, **named: Any) -> None:
        key = None if named else key_of(*args)
        attributes = known.get(key)
        if attributes is None:
            initialize(self, *args, **named)
            if not named:
                known[key] = dict(self.__dict__)
            return
        self.__dict__.update(attributes)
        self.__dict__.update(zip(varying, args, strict=False))

    cls.__init__ = initialize_again  # type: ignore[misc]
