"""Copies between a device and the memory of its host, counted.

On CUDA, host tensors are pinned and a stream of their own copies them, beside the kernels of the step. On the CPU a copy stands for what a
GPU would hold, so that the same code runs. The CUDA side has not been run yet.
"""

from __future__ import annotations

import torch

from fxshard.ops.host import count


class HostCopies:
    """The copies of one optimiser's step, to and from ``device``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device, usable after ``arrive``; ``value`` itself if it is on a GPU already."""
        if value.device.type != "cpu":
            return value
        count(value.nbytes, inward=True)
        if self.stream is None:
            return value.clone()
        with torch.cuda.stream(self.stream):
            made = value.to(self.device, non_blocking=True)
        made.record_stream(torch.cuda.current_stream(self.device))
        return made

    def to_host(self, value: torch.Tensor, host: torch.Tensor | None) -> torch.Tensor:
        """Copies ``value`` to the tensor ``host``, or to a new one; complete after ``finish``."""
        if host is None or host.shape != value.shape or host.dtype != value.dtype or host.device.type != "cpu":
            host = torch.empty_like(value, device="cpu", pin_memory=self.stream is not None)
        count(value.nbytes, inward=False)
        if self.stream is None:
            return host.copy_(value)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(value, non_blocking=True)
        value.record_stream(self.stream)
        return host

    def arrive(self) -> None:
        """Makes the step's kernels wait for the copies to the device so far."""
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def finish(self) -> None:
        """Waits until all copies are done, so that their buffers are free and host tensors can be read."""
        if self.stream is not None:
            self.stream.synchronize()
