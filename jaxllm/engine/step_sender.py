"""Packed steps on their way to the devices, each with what its kernels need to add up between devices."""

import jax
import numpy as np
from jaxtyping import Int32

from jaxllm.engine.parts import lines, turns
from jaxllm.engine.programs import Program
from jaxllm.engine.spec import RunnerSpec
from jaxllm.parallel.mailboxes import Mailboxes
from jaxllm.parallel.mesh import DATA


class StepSender:
    """Sends steps; owns the mailboxes of the devices, where they have some."""

    def __init__(self, spec: RunnerSpec):
        self._spec, self._mailboxes = spec, None
        if spec.peers:
            self._mailboxes = Mailboxes(
                spec.placement, lines(spec.model.hidden_size, spec.placement.tensor_parallel_size)
            )

    def send(self, program: Program, buffer: Int32[np.ndarray, "buffers"]) -> jax.Array:
        """The argument of one run of `program`."""
        if self._mailboxes is not None:
            where, _ = program.layout.fields["peers"]
            buffer = buffer.copy()  # what was sent before may still be on its way
            buffer[where] = self._mailboxes.take(program.shape.iterations * turns(self._spec.model))
        return self._spec.placement.put(buffer, DATA)
