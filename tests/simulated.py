"""A simulated GPU: its tensors say that they are elsewhere, and compute on the CPU.

    with simulated.gpu(module) as waits:
        module.train(args)  # with args.cuda

An operation on a tensor of the GPU and one of the CPU raises a RuntimeError, as on a GPU, where both
have at least one dimension. `waits` counts what makes the CPU wait for a GPU: a copy in either
direction from memory that is not pinned, the number of steps that a mask selects, and the truth or
value of a number.

The simulated device is torch's "meta", whose backward pass runs in the calling thread.
"""

import contextlib
import sys
import traceback
from collections import Counter
from types import ModuleType

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
DEVICE = torch.device("meta")
waits: Counter[tuple[str, str]] = Counter()  # (kind, the script's line)
watched = ""  # the script's file


class Elsewhere(torch.Tensor):
    """A tensor of the simulated GPU; `here` is its twin on the CPU."""

    here: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: torch.Tensor):
        shape, strides = here.size(), here.stride()
        kind = {"dtype": here.dtype, "layout": here.layout, "device": DEVICE}
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, **kind)

    def __init__(self, here: torch.Tensor):
        self.here = here

    @classmethod
    def __torch_dispatch__(cls, operation, types, inputs=(), options=None):
        return execute(operation, inputs, options or {})

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):  # vector_to_parameters does so
        self.here = other.here

    def numpy(self, *, force=False):
        count("copy")
        return self.here.detach().numpy()

    def new_tensor(self, number):
        count("copy")
        return Elsewhere(torch.tensor(number, dtype=self.dtype))


class Everywhere(TorchDispatchMode):
    """Operations that only create a tensor come here, too."""

    def __torch_dispatch__(self, operation, types, inputs=(), options=None):
        return execute(operation, inputs, options or {})


def count(kind: str, times: int = 1) -> None:
    for frame in reversed(traceback.extract_stack()):
        if frame.filename == watched:
            waits[kind, frame.line or ""] += times
            return


def check_devices(operation, elsewhere: list, here: list) -> None:
    """Counts waits; raises RuntimeError where the devices of an operation's tensors differ."""
    if not elsewhere or operation is aten.copy_.default:
        return
    if operation in (aten._local_scalar_dense.default, aten.nonzero.default):
        count("number")
    elif operation is aten.index.Tensor:  # torch moves indices to the tensor's device
        count("copy", len(here))
        count("mask", sum(x.dtype == torch.bool for x in elsewhere[1:]))
    elif any(x.dim() > 0 for x in here):
        raise RuntimeError(f"{operation}: tensors are on the CPU and on the GPU")


def execute(operation, inputs, options):
    flat, structure = tree_flatten((inputs, options))
    tensors = [x for x in flat if isinstance(x, torch.Tensor)]
    elsewhere = [x for x in tensors if isinstance(x, Elsewhere)]
    here = [x for x in tensors if not isinstance(x, Elsewhere)]
    target = options.get("device")
    moves = target is not None
    to_gpu = moves and torch.device(target) == DEVICE
    check_devices(operation, elsewhere, here)
    between = operation is aten._to_copy.default and moves and to_gpu != bool(elsewhere)
    if between or operation is aten.copy_.default and elsewhere and here:
        count("copy")

    flat = [x.here if isinstance(x, Elsewhere) else x for x in flat]
    real_inputs, real_options = tree_unflatten(flat, structure)
    if to_gpu:
        real_options["device"] = torch.device("cpu")
    with torch._C._DisableTorchDispatch():
        output = operation(*real_inputs, **real_options)
    schema = operation._schema
    if schema.is_mutable:  # in place: what was given is what comes back
        return inputs[0] if schema.returns else None
    if to_gpu or (elsewhere and not moves):
        return tree_map(lambda x: Elsewhere(x) if isinstance(x, torch.Tensor) else x, output)
    return output


class Torch(ModuleType):
    """What a script sees as torch. In inference mode operations would not be seen here."""

    inference_mode = torch.no_grad

    def __getattr__(self, name: str):
        return getattr(torch, name)

    def device(self, name: str):
        return DEVICE if name.startswith("cuda") else torch.device(name)

    def as_tensor(self, x, device=None):
        x = torch.as_tensor(x)
        return x if device is None else x.to(device)

    def autocast(self, *_, **__):
        return contextlib.nullcontext()

    class cuda:
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)


@contextlib.contextmanager
def gpu(module: ModuleType):
    """Makes --cuda of a script the simulated GPU -> waits, which is empty at first."""
    global watched
    waits.clear()
    watched = module.__file__ or ""
    adam = sys.modules["torch.optim.adam"]
    known = adam._device_dtype_check_for_fused
    adam._device_dtype_check_for_fused = lambda *_, **__: None
    module.torch = Torch("torch")
    try:
        with Everywhere():
            yield waits
    finally:
        module.torch = torch
        adam._device_dtype_check_for_fused = known
