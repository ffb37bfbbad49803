"""The processes that train one model together, started by `torchrun`: who takes which rows, what they tell each other.

Small things (losses, decisions, random states, memory) travel as CPU tensors through gloo, so that no GPU is waited
for; gradients and sharded weights are the business of PyTorch's DDP and FSDP2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from switchhead.errors import RunError, TrainingError

Parallel = Literal["ddp", "fsdp"]
Result = TypeVar("Result")
TIMEOUT = timedelta(minutes=10)  # for a rank that hangs; one that dies is noticed at once
PATIENCE = timedelta(hours=2)  # for one that reads or writes many gigabytes
# Backward of a norm as one kernel, for the tokens and for the weight at once, takes two to three times what two take.
_COMPILER: dict[str, str | int | bool | Callable] = {"triton.mix_order_reduction": False}


@dataclass(frozen=True)
class World:
    """This process among all of them; `ALONE` is one without others.

    Attributes:
        rank: number of the process.
        size: processes in all.
        local_rank: number of the process on its host.
        patient: all ranks again, waiting longer for each other; None: a world of one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    patient: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and speaks for all."""
        return self.rank == 0

    def share(self, rows: int) -> range:
        """The rows of a batch that this rank takes: consecutive, the first ranks one more where they do not divide."""
        return self._share_of(self.rank, rows)

    def place(self, device: torch.device) -> torch.device:
        """The device of this rank.

        Raises:
            RunError: there are more ranks on this host than GPUs.
        """
        if device.type != "cuda" or self.size == 1:
            return device
        if self.local_rank >= torch.cuda.device_count():
            raise RunError(
                f"rank {self.rank} finds {torch.cuda.device_count()} GPUs for {self.local_rank + 1} or more ranks on "
                "this host: lower --nproc-per-node"
            )
        return torch.device("cuda", self.local_rank)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, the same on each."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def min(self, values: Sequence[float]) -> list[float]:
        """Least values over all ranks."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return self.sum([float(flag)])[0] > 0

    def together(self, action: Callable[[], Result], *, patient: bool = False) -> Result:
        """Let every rank do something by itself, which must not speak to others; where it fails, it fails on all.

        Args:
            action: what to do.
            patient: wait `PATIENCE` for the slowest, not `TIMEOUT`.

        Raises:
            Exception: what the action raised, on the first rank where it failed, or where others were lost meanwhile.
            RunError: on all other ranks.
        """
        result, failure = None, None
        try:
            result = action()
        except Exception as error:  # whatever it is: the others must not wait for this rank
            failure = error
        own = self.size if failure is None else self.rank
        try:
            (failed,) = self._reduce([own], dist.ReduceOp.MIN, self.patient if patient else None)
        except RuntimeError:  # others are gone
            if failure is None:
                raise
            failed = self.rank  # what failed here says more
        if failure is not None and failed == self.rank:
            raise failure
        if failed < self.size:
            raise RunError(f"rank {self.rank} stops because rank {failed:.0f} failed; its message says why")
        return result  # pyright: ignore[reportReturnType] (nothing failed)

    def first(self, action: Callable[[], Result], *, patient: bool = False) -> Result | None:
        """Let rank 0 do something while the others wait; its result there, None elsewhere.

        Args:
            action: what to do.
            patient: see `together`.

        Raises:
            Exception: what the action raised, on rank 0.
            RunError: then, on all other ranks.
        """
        return self.together(lambda: action() if self.is_first else None, patient=patient)

    def from_first(self, value: Any) -> Any:
        """The JSON value that rank 0 has, on every rank."""
        if self.size == 1:
            return value
        content = json.dumps(value).encode() if self.is_first else b""
        (length,) = self.sum([len(content)])
        sent = torch.tensor(list(content) or [0] * int(length), dtype=torch.uint8)
        dist.broadcast(sent, src=0)
        return json.loads(bytes(sent.tolist()))

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """CPU tensors of one shape from all ranks, by rank."""
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(gathered, tensor)
        return gathered

    def gather_rows(self, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """On rank 0, tensors of which every rank has its `share` of `rows`, whole and on the CPU; elsewhere none."""
        if self.size == 1:
            return list(tensors)
        tensors = [tensor.cpu() for tensor in tensors]
        if not self.is_first:
            for tensor in tensors:
                dist.send(tensor.contiguous(), dst=0)
            return []
        parts = [[tensor] for tensor in tensors]
        for rank in range(1, self.size):
            if n_rows := len(self._share_of(rank, rows)):
                for part in parts:
                    part.append(part[0].new_empty(n_rows, *part[0].shape[1:]))
                    dist.recv(part[-1], src=rank)
        return [torch.cat(part) for part in parts]

    def _share_of(self, rank: int, rows: int) -> range:
        each, more = divmod(rows, self.size)
        start = rank * each + min(rank, more)
        return range(start, start + each + (rank < more))

    def _reduce(
        self, values: Sequence[float], operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
    ) -> list[float]:
        if self.size == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(reduced, op=operation, group=group)
        return reduced.tolist()


ALONE = World()

# Process groups for as long as the process lives: if the last to let go of one is DDP, the interpreter waits, holding
# its lock, for a thread of the group that may need that lock.
_KEPT: list[object] = []


@contextlib.contextmanager
def join_world(device: torch.device) -> Iterator[World]:
    """The processes that `torchrun` started; a world of one without it.

    Raises:
        RunError: the environment says less than `torchrun` does, the others are not to be found, or the caller has
            set up a process group, which stays as it is.
        TrainingError: another process was lost.
    """
    if dist.is_initialized():
        raise RunError(
            "this process is in a process group already: training sets up its own, so call "
            "torch.distributed.destroy_process_group() first"
        )
    if not dist.is_torchelastic_launched() and "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise RunError(f"WORLD_SIZE is set but not {missing[0]}: unset it, or start the processes with torchrun")
    world = World(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))
    if (place := world.place(device)).type == "cuda":
        torch.cuda.set_device(place.index or 0)  # a device of no number is refused
    try:
        yield _meet(world, backend)
    except BaseException as error:
        # To destroy a group is to wait for NCCL's kernels; they may wait for ranks that are gone, or wait for this.
        with contextlib.suppress(Exception):  # there may be none yet; and what ended this one is to be told
            distributed_c10d._abort_process_group()  # pyright: ignore[reportPrivateUsage]
        if not isinstance(error, RuntimeError) or not _is_lost_connection(error):
            raise
        raise TrainingError(
            f"rank {world.rank} of {world.size} lost another rank ({fact_of(error)}): its own message or torchrun's "
            "says why. --resume goes on from the last checkpoint, on any number of ranks"
        ) from error
    else:
        dist.destroy_process_group()


class Parallelism:
    """A model on several ranks: what to call, and when gradients are summed.

    Gradients become the mean over ranks, so that a rank's loss counts `world.size` times its share.

    Args:
        model: on its device, the same on every rank; sharded in place by "fsdp".
        world: the ranks.
        kind: "ddp" keeps the model whole on every rank, "fsdp" shards parameters, gradients and optimizer state.
        compile: run it through `torch.compile`: whole in a process on its own, layer by layer under `torchrun`, where
            one compilation serves all layers.

    Raises:
        RunError: "fsdp" without `torchrun`.
    """

    def __init__(self, model: nn.Module, world: World, kind: Parallel = "ddp", *, compile: bool = False) -> None:
        if kind not in get_args(Parallel):
            raise ValueError(f"parallel is {kind!r}; it must be one of {', '.join(get_args(Parallel))}")
        if kind == "fsdp" and not dist.is_initialized():
            raise RunError("fsdp shards a model over the processes of torchrun: start it with torchrun, or use ddp")
        self._compiled = compile
        self.forward: Callable = model
        if compile and dist.is_initialized():  # the whole would take minutes: DDP has it compiled in pieces
            for layer in _layers(model):
                layer.compile(options=_COMPILER)
        elif compile:
            self.forward = torch.compile(_without_scores(model), options=_COMPILER)
        if kind == "fsdp":
            _shard(model, world)
        elif world.size > 1:
            self.forward = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def eager(self) -> AbstractContextManager:
        """Around forward passes of the plain model whose shapes vary, or whose modules are watched: compiled code is
        made for one shape, and does not call hooks that came after it."""
        return torch.compiler.set_stance("force_eager") if self._compiled else contextlib.nullcontext()

    def synchronised(self, *, last: bool) -> AbstractContextManager:
        """Around forward and backward of a micro-batch: gradients are summed over ranks after the last one only."""
        if isinstance(self.forward, FSDPModule):
            self.forward.set_requires_gradient_sync(last)
        elif isinstance(self.forward, DistributedDataParallel) and not last:
            return self.forward.no_sync()
        return contextlib.nullcontext()


def shard_dimension(shape: Sequence[int], ranks: int) -> int:
    """Dimension along which FSDP2 cuts a parameter: the first that divides, or the first of all.

    That one alone may be cut unevenly; FSDP2 pads it. Experts are few, so theirs are mostly cut along their widths.
    """
    return next((dimension for dimension, width in enumerate(shape) if width % ranks == 0), 0)


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards: every rank has to ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on_first(tensor: Tensor) -> Tensor:
    """The same for rank 0 alone, and on the CPU if it was in shards: one at a time on a GPU, and on one host once."""
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.full_tensor()
    return full.cpu() if dist.get_rank() == 0 else full.new_empty(0)


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that all ranks have."""
    if not isinstance(like, DTensor):
        return tensor
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def with_fresh_keys(store: Any, rank: int, size: int) -> Any:
    """The `torch.distributed` store with keys that no group had before; every rank has to ask.

    torchrun's store outlives the processes that it starts anew, and keys of a group that is gone name closed sockets.
    So the first rank makes up a name, and tells it to each that asks with a token of its own, until that one confirms.
    """
    if rank > 0:
        token = uuid.uuid4().hex
        store.set(f"token-{rank}", token)
        name = store.get(f"name-for-{token}").decode()  # waits for it
        store.set(f"{name}-{rank}", "heard")
    else:
        name, end = uuid.uuid4().hex, time.monotonic() + TIMEOUT.total_seconds()
        missing = range(1, size)
        while missing := [other for other in missing if not store.check([f"{name}-{other}"])]:
            if time.monotonic() > end:
                raise dist.DistStoreError(f"timed out waiting for rank {missing[0]}")
            for other in missing:
                if store.check([f"token-{other}"]):  # perhaps of a process that is gone
                    store.set(f"name-for-{store.get(f'token-{other}').decode()}", name)
            time.sleep(0.05)
    return dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]


def fact_of(error: RuntimeError) -> str:
    """What gloo or NCCL say, without the place in their source before it and the advice after it."""
    *_, fact = str(error).partition("Last error:\n")  # NCCL's own, below the general
    line = (fact or str(error)).strip().splitlines()[0]
    return re.sub(r"^\[[^]]*\] ", "", line).split(". ")[0]


class _Losses(NamedTuple):
    """Of the model's output what training reads."""

    loss: Tensor
    aux_loss: Tensor | None
    aux_losses: dict[str, Tensor] | None
    memory: tuple[Tensor, ...] | None


def _without_scores(model: nn.Module) -> Callable[..., _Losses]:
    """The model without its scores: compiled code fills a gradient of zeros for every output that has none."""

    def forward(**inputs: Any) -> _Losses:
        output = model(**inputs)
        return _Losses(output.loss, output.aux_loss, output.aux_losses, output.memory)

    return forward


def _layers(model: nn.Module) -> Iterable[nn.Module]:
    return model.model.layers  # pyright: ignore[reportReturnType, reportAttributeAccessIssue]


def _shard(model: nn.Module, world: World) -> None:
    # Scores are a view, as the output of any linear layer on a batch; nothing writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (world.size,))

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dimension(parameter.shape, world.size))

    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def _meet(world: World, backend: str) -> World:
    """Set up the process groups, which takes all ranks."""
    try:
        store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
        dist.init_process_group(
            backend, store=with_fresh_keys(store, rank, size), rank=rank, world_size=size, timeout=TIMEOUT
        )
        patient = dist.new_group(backend="gloo", timeout=PATIENCE)
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunError(
            f"rank {world.rank} of {world.size} does not find the other ranks by way of {place} ({fact_of(error)}): "
            "see that all of them were started; between hosts, GLOO_SOCKET_IFNAME names the network interface"
        ) from error
    _KEPT.extend((dist.group.WORLD, patient))
    return dataclasses.replace(world, patient=patient)


def _is_lost_connection(error: RuntimeError) -> bool:
    """gloo raises plain RuntimeErrors, which only their text tells from others."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection" in str(error)
