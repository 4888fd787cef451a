"""Lets megatron-core run without a GPU (or without using it). Only `backend` imports it.

megatron-core asks for CUDA by name in many places. While `CpuStandIn` is active in a thread, a CUDA
device means the CPU, CUDA's random generator is the CPU's, and streams and events do nothing. Other
threads keep plain torch semantics, apart from the functions of `torch.cuda`. Works with megatron-core
0.16 to 0.19.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CpuStandIn:
    """Context in which megatron-core finds the CPU wherever it asks for CUDA.

    Memory: none. In place: replaces functions of `torch.cuda` and of Megatron's random module until exit.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __enter__(self) -> CpuStandIn:
        from megatron.core.tensor_parallel import random

        for name, stand_in in _cuda_stand_ins().items():
            self._replace(torch.cuda, name, stand_in)
        self._replace(torch.cuda.nvtx, "range_push", _nothing)
        self._replace(torch.cuda.nvtx, "range_pop", _nothing)
        self._replace(random, "_get_cuda_rng_state", _get_rng_state)
        self._replace(random, "_set_cuda_rng_state", _set_rng_state)
        # "CPU RNG state changed within GPU RNG context": here they are one generator.
        logger = logging.getLogger(random.__name__)
        logger.addFilter(_is_not_about_cpu_rng)
        self._undo.callback(logger.removeFilter, _is_not_about_cpu_rng)
        self._undo.enter_context(_CudaMeansCpu())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _replace(self, owner: Any, name: str, stand_in: Any) -> None:
        self._undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, stand_in)


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects tensor factories and moves that name a CUDA device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers compare the type with CUDA's spelling.
            return str(func(args[0])).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class _NoStream:
    """Stands for a CUDA stream or event: everything on the CPU happens in program order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.device = CPU

    def record_event(self, event: object = None) -> _NoStream:
        return self

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...


def _cuda_stand_ins() -> dict[str, Any]:
    return {
        "current_device": _current_device,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": torch.default_generator.manual_seed,
        "current_stream": _NoStream,
        "default_stream": _NoStream,
        "Stream": _NoStream,
        "Event": _NoStream,
        "stream": _on_stream,
    }


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _current_device() -> torch.device:
    return CPU


def _nothing(*args: object, **kwargs: object) -> None:
    return None


@contextlib.contextmanager
def _on_stream(stream: object) -> Iterator[None]:
    yield


def _get_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _is_not_about_cpu_rng(record: logging.LogRecord) -> bool:
    return "RNG state changed" not in record.getMessage()
