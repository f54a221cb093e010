"""The network repacked for speed on this machine's CPU: model.pack("int8")

A CPU that continues one text reads every weight once per token, so memory is the limit: fewer
bytes, and matrices laid out as the kernels read them, are all that helps. Each class packs one
matrix. The kernels are PyTorch's own, but private: each is tried on a small matrix first, and where
it is missing or wrong, plain operations do the same.

`Screen` saves the output head, a third of all bytes, from being read where only the best few scores
matter.
"""

from __future__ import annotations

import abc
import functools
import warnings
from collections.abc import Callable
from typing import NoReturn, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from minigpt2.cache import KVCache
from minigpt2.model import GPT2, Block, Mask
from minigpt2.ops import Explicit, Fused, fused
from minigpt2.options import KINDS


class Packed(abc.ABC):
    """One matrix and its bias, whatever the weights are kept in."""

    @abc.abstractmethod
    def product(self, rows: Tensor) -> Tensor:
        """rows @ weight + bias: (N, in) float32 -> (N, out) float32."""

    def gelu(self, rows: Tensor) -> Tensor:
        """GELU, in its tanh form, of the product; in whatever dtype another product takes."""
        return F.gelu(self.product(rows), approximate="tanh")


class Exact(Packed):
    """The network's own matrix and its bits.

    MKL keeps to one core for a matrix times one row, but not for two matrices: so one row meets the
    halves of the outputs, where a trial of several shows the same bits.
    """

    _halved = False

    def product(self, rows: Tensor) -> Tensor:
        return self._in_halves(rows) if self._halved and len(rows) == 1 else self._whole(rows)

    def _try_halves(self, n_in: int) -> None:
        rows = torch.randn(8, 1, n_in, generator=torch.Generator().manual_seed(0))
        self._halved = all(torch.equal(self._in_halves(row), self._whole(row)) for row in rows)

    @abc.abstractmethod
    def _in_halves(self, row: Tensor) -> Tensor: ...

    @abc.abstractmethod
    def _whole(self, rows: Tensor) -> Tensor: ...


class ExactLinear(Exact):
    """A matrix with a bias."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        # (in, out), from the file's small pages to large ones
        self._weight = weight.T.clone(memory_format=torch.contiguous_format)
        self._bias = bias
        n_in, n_out = self._weight.shape
        if n_out % 2 == 0:
            self._weights = self._weight.view(n_in, 2, -1).transpose(0, 1)  # (2, in, out / 2)
            self._biases = self._bias.view(2, 1, -1)
            self._try_halves(n_in)

    def _in_halves(self, row: Tensor) -> Tensor:
        return torch.baddbmm(self._biases, row.expand(2, 1, -1), self._weights).view(1, -1)

    def _whole(self, rows: Tensor) -> Tensor:
        return torch.addmm(self._bias, rows, self._weight)


class ExactHead(Exact):
    """The (V, C) table as the head; `table` is a copy in large pages, the model's from here on."""

    def __init__(self, table: Tensor) -> None:
        self.table = table.clone()
        V, C = table.shape
        half = V // 128 * 64  # MKL takes rows by blocks, and those left at the end by other code
        self._tables = self.table[: 2 * half].view(2, half, C).transpose(1, 2)  # (2, C, half)
        self._rest = self.table[2 * half :]
        self._try_halves(C)

    def _in_halves(self, row: Tensor) -> Tensor:
        halves = torch.bmm(row.expand(2, 1, -1), self._tables).view(1, -1)
        return torch.cat([halves, F.linear(row, self._rest)], dim=-1)

    def _whole(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.table)


class Plain(Packed):
    """What the others are where their kernel does not work: rounded weights, F.linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def product(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weight, self._bias)


class OneDNN(Packed):
    """float32 or bfloat16, in blocks as oneDNN's kernels read them.

    It is told to expect 8 rows: told of one, its float32 blocks are a third slower for several, and
    hardly faster for one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._bias = None if bias is None else bias.to(dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), 8)

    def product(self, rows: Tensor) -> Tensor:
        return self._product(rows, "none", "").float()

    def gelu(self, rows: Tensor) -> Tensor:
        return self._product(rows, "gelu", "tanh")  # while the product is still in the cache

    def _product(self, rows: Tensor, then: str, how: str) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            rows.to(self._dtype), self._weight, self._bias, then, [], how
        )
        return product


class Float16(Packed):
    """float16 weights times float32 activations, added up in float32 (FBGEMM)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)

    def product(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(rows, self._weight)
        return product


class Int8(Packed):
    """int8 weights with a scale for each output; activations rounded to 8 bits on the way (FBGEMM).

    FBGEMM takes one activation scale per call. So that a row's result does not depend on its
    neighbours, several rows are first brought to [-1, 1] each. One row alone is rounded by FBGEMM
    itself, on a grid that holds the zero: the two differ by rounding to 8 bits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        q, scale = int8_rows(weight)
        zeros = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the age of torch.ao
            quantised = torch._make_per_channel_quantized_tensor(q, scale.double(), zeros, 0)
        self._weight = torch.ops.quantized.linear_prepack(quantised, bias)
        self._bias = torch.zeros(len(q)) if bias is None else bias
        self._sums = q.sum(dim=1) * scale  # of each output's weights
        # Without VNNI the kernel adds pairs of products in 16 bits, which 8 bits would overrun.
        self._reduce_range = not torch.cpu._is_vnni_supported()

    def product(self, rows: Tensor) -> Tensor:
        if len(rows) == 1:
            return self.on_one_grid(rows)
        low, high = rows.amin(dim=-1, keepdim=True), rows.amax(dim=-1, keepdim=True)
        middle = (low + high) / 2
        half = ((high - low) / 2).clamp(min=torch.finfo(rows.dtype).tiny)
        product = self.on_one_grid((rows - middle).div_(half))  # of rows from -1 to 1, plus bias
        torch.lerp(self._bias, product, half, out=product)  # bias + half * (product - bias)
        return product.addr_(middle.squeeze(1), self._sums)

    def on_one_grid(self, rows: Tensor) -> Tensor:
        """The product with all rows rounded to one grid, from their least number to their
        largest."""
        product: Tensor = torch.ops.quantized.linear_dynamic.default(
            rows, self._weight, self._reduce_range
        )
        return product


class Int4(Packed):
    """4-bit weights with a scale and an offset for each group of inputs; bfloat16 activations."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        spare = -len(weight) % 64  # the kernel takes outputs by 64
        q, scale, zero = (F.pad(part, (0, 0, 0, spare)) for part in int4_groups(weight))
        self._n_out, self._bias = len(weight), bias
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(q, 1)
        self._scales = torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous().bfloat16()
        self._group = weight.shape[1] // scale.shape[1]

    def product(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            rows.bfloat16(), self._weight, self._group, self._scales
        )
        product = product[:, : self._n_out].float()
        return product if self._bias is None else product + self._bias


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) -> int8 of the same shape and a scale (out,): weight is about q * scale. A row of
    zeros stays one."""
    scale = weight.abs().amax(dim=1) / 127
    scale = torch.where(scale == 0, 1, scale)
    return (weight / scale[:, None]).round().to(torch.int8), scale


def int4_groups(weight: Tensor, group: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """(out, in) -> int32 0..15 of the same shape, scale and zero (out, in / group): weight is about
    (q - 8) * scale + zero.

    Of a group's range and some narrower ones, the one of the least squared error is taken.
    """
    groups = weight.reshape(len(weight), -1, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    best: tuple[Tensor, ...] = (torch.full_like(low, torch.inf), groups, low, low)
    for share in (1.0, 0.95, 0.9, 0.85, 0.8):
        # bfloat16, as the kernel will see them
        scale = (share * (high - low) / 15).bfloat16().float()
        scale = torch.where(scale == 0, 1, scale)
        zero = (share * low + 8 * scale).bfloat16().float()
        q = ((groups - zero) / scale + 8).round().clamp(0, 15)
        error = ((q - 8) * scale + zero - groups).square().sum(dim=-1, keepdim=True)
        tried = (error, q, scale, zero)
        better = error < best[0]
        best = tuple(torch.where(better, new, old) for new, old in zip(tried, best, strict=True))
    _, q, scale, zero = best
    return q.flatten(1).int(), scale.squeeze(-1), zero.squeeze(-1)


def rounded(weight: Tensor, kind: str) -> Tensor:
    """(out, in) float32 -> the weights that `kind` keeps, as float32."""
    if kind == "int8":
        q, scale = int8_rows(weight)
        return q * scale[:, None]
    if kind == "int4":
        q, scale, zero = int4_groups(weight)
        groups = q.view(*scale.shape, -1) - 8
        return (groups * scale.unsqueeze(-1) + zero.unsqueeze(-1)).flatten(1)
    dtype: torch.dtype = getattr(torch, kind)
    return weight.to(dtype).float()


PACKERS: dict[str, Callable[[Tensor, Tensor | None], Packed]] = {
    "float32": functools.partial(OneDNN, dtype=torch.float32),
    "bfloat16": functools.partial(OneDNN, dtype=torch.bfloat16),
    "float16": Float16,
    "int8": Int8,
    "int4": Int4,
}


@functools.cache
def works(kind: str, n_in: int) -> bool:
    """Whether the kernel is there, takes matrices of so many inputs, and computes what it should,
    one row at a time and several."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, n_in, generator=generator)
    rows = torch.randn(5, n_in, generator=generator)
    expected = rows @ rounded(weight, kind).T
    try:
        packed = PACKERS[kind](weight, None)
        results = packed.product(rows), torch.cat([packed.product(row[None]) for row in rows])
    except (RuntimeError, AttributeError, NotImplementedError, IndexError):
        return False
    return all(bool((got - expected).norm() < 0.05 * expected.norm()) for got in results)


def pack_matrix(weight: Tensor, bias: Tensor | None, kind: str) -> Packed:
    """An (out, in) matrix in the form `kind`, or in plain operations where its kernel fails."""
    weight = weight.detach().float()
    bias = None if bias is None else bias.detach().to(torch.float32, copy=True)
    if kind == "exact":
        return ExactHead(weight) if bias is None else ExactLinear(weight, bias)
    if kind == "int4" and weight.shape[1] % 32:
        return Plain(weight, bias)  # too narrow for groups
    if works(kind, weight.shape[1]):
        return PACKERS[kind](weight, bias)
    return Plain(rounded(weight, kind), bias)


class Screen:
    """The best scores of the head without reading all of it.

    An int8 copy of the table gives every score within a known distance. A token whose highest
    possible score does not reach the k-th best lowest one cannot be among the k best. Only the
    others are computed from the table itself; where two of those that decide are closer than
    float32 can tell apart, the whole head is computed.
    """

    def __init__(self, table: Tensor) -> None:
        q, scale = int8_rows(table)
        kept = q * scale[:, None]
        # Two more inputs, which nothing weighs, hold the ends of the activations' range.
        self._kept = Int8(F.pad(kept, (0, 2)), None)
        # For any x: |table @ x - kept @ x| <= |table - kept| |x|, row by row. A float32 sum of n
        # products is within 6 sqrt(n) / 2**24 of the product of the norms, whatever its order, but
        # for a chance of exp(-18) (Higham and Mary 2019, theorem 2.4).
        self._rounding = 6 * table.shape[1] ** 0.5 * 2.0**-24 * table.norm(dim=1)  # (V,)
        self._errors = (table - kept).norm(dim=1) + self._rounding
        self._largest = float(kept.norm(dim=1).max())

    def __call__(self, x: Tensor, table: Tensor, k: int) -> Tensor | None:
        """(N, C) -> (N, V): the k best scores of each row, and -inf for what cannot be among them;
        None where rounding might decide, or a number is none."""
        # x in 127ths of its largest number, and what is left in 254ths of one of those: whole
        # numbers, which the kernel takes as they are.
        step = x.abs().amax(dim=1, keepdim=True) / 127
        if not step.isfinite().all():
            return None
        x = x / torch.where(step == 0, 1, step)
        whole = x.round()
        finer = ((x - whole) * 254).round()
        parts = F.pad(torch.cat([whole, finer]), (0, 2))
        parts[:, -2:] = parts.new_tensor([-128, 127])
        coarse, fine = self._kept.on_one_grid(parts).chunk(2)  # (N, V) each
        about = coarse.add(fine, alpha=1 / 254)
        size, lost = (part.norm(dim=1, keepdim=True) for part in (x, x - whole - finer / 254))
        distance = self._errors * size
        floor = about - distance
        floor = floor.amax(dim=1, keepdim=True) if k == 1 else floor.topk(k).values[:, -1:]
        highest = distance.add_(about)
        ids = (highest >= floor - 2 * self._largest * lost).any(dim=0).nonzero().squeeze(1)
        scores = F.linear(x, table[ids])  # (N, candidates)
        if len(ids) > k:
            best = scores.topk(k + 1)
            last, next_ = (best.values[:, n] for n in (-2, -1))
            doubt = self._rounding[ids[best.indices[:, -2:]]].sum(dim=1) * size[:, 0]
            if bool((last - next_ <= 2 * doubt).any()):  # theirs, and that of the sums here
                return None
        return about.fill_(-torch.inf).index_copy_(1, ids, scores * step)


@functools.cache
def whole_numbers_stay(n_in: int) -> bool:
    """Whether the int8 kernel multiplies whole numbers exactly, as Screen takes for granted."""
    if not works("int8", n_in + 2) or not torch.cpu._is_vnni_supported():
        return False
    draw = torch.Generator().manual_seed(0)
    weight, rows = (torch.randint(-127, 128, (64, n_in + 2), generator=draw) for _ in range(2))
    weight[:, 0], weight[:, -2:] = 127, 0
    rows[:, -2:] = torch.tensor([-128, 127])
    products = Int8(weight.float(), None).on_one_grid(rows.float())
    return torch.equal(products, (rows @ weight.T).float())


class PackedBlock:
    """model.Block in evaluation mode, in one piece: with one token under way, calls from module to
    module would cost as much as all that is computed between the matrices."""

    def __init__(self, block: Block, kind: str) -> None:
        attn, mlp = block.attn, block.mlp
        self.layer, self.n_head, self.scale = attn.layer, attn.n_head, attn.scale
        self.activation_function = mlp.activation_function
        # One kernel for the formula, unless every bit counts.
        self.gelu = kind != "exact" and mlp.activation_function in ("gelu_new", "gelu_pytorch_tanh")
        self.ln_1, self.ln_2 = (
            (ln.weight.clone(), ln.bias.clone(), ln.epsilon) for ln in (block.ln_1, block.ln_2)
        )
        self.c_attn, self.attn_c_proj, self.c_fc, self.mlp_c_proj = (
            pack_matrix(linear.weight.T, linear.bias, kind)
            for linear in (attn.c_attn, attn.c_proj, mlp.c_fc, mlp.c_proj)
        )

    def __call__(self, x: Tensor, mask: Mask, cache: KVCache | None, ops: Explicit) -> Tensor:
        B, T, C = x.shape
        x = x.view(-1, C)  # (B*T, C)
        qkv = self.c_attn.product(ops.layer_norm(x, *self.ln_1))  # (B*T, 3C)
        q, k, v = qkv.view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4).unbind()  # (B, H, T, D)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # (B, H, S, D)
        heads = ops.attention(q.contiguous(), k, v, mask, self.scale, 0.0)
        x = x + self.attn_c_proj.product(heads.transpose(1, 2).reshape(-1, C))
        rows = ops.layer_norm(x, *self.ln_2)
        if self.gelu:
            hidden = self.c_fc.gelu(rows)  # (B*T, 4C)
        else:
            hidden = ops.activation(self.activation_function, self.c_fc.product(rows))
        return (x + self.mlp_c_proj.product(hidden)).view(B, T, C)


class PackedOps(Fused):
    """The head of a packed model: screened where only the best scores matter, else whole."""

    def __init__(self, head: Packed, screen: Screen | None) -> None:
        self.head, self.screen = head, screen

    def unembedding(self, x: Tensor, table: Tensor, top: int = 0) -> Tensor:
        if 0 < top < len(table) and self.screen is not None:
            screened = self.screen(x.flatten(0, -2), table, top)
            if screened is not None:
                return screened.view(*x.shape[:-1], -1)
        return self.head.product(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def pack(model: GPT2, kind: str) -> None:
    """Repack all matrices, one after the other, and free the originals; see GPT2.pack.

    Raises:
        ValueError: an unknown kind; a model that is packed already, trains, or is not on the CPU.
    """
    if kind not in KINDS:
        raise ValueError(f"no such packing: {kind!r}; there are {', '.join(KINDS)}")
    if model.ops is not fused or model.training or model.wte.weight.device.type != "cpu":
        raise ValueError(
            "pack() takes a model in evaluation mode, on the CPU, with ops.fused, once"
        )
    if model.wte.weight.dtype != torch.float32:
        raise ValueError(f"pack() takes a float32 model, this one is {model.wte.weight.dtype}")
    model.requires_grad_(False)
    head = (model.wte if model.lm_head is None else model.lm_head).weight
    # Of half the bytes or less, the whole head is as fast to read.
    screened = kind in ("exact", "float32") and whole_numbers_stay(head.shape[1])
    screen = Screen(head.detach()) if screened else None
    blocks, packed_blocks = model.h, []
    del model.h
    while len(blocks):  # one after the other, so that no second copy of all is held
        packed_blocks.append(PackedBlock(cast("Block", blocks[0]), kind))
        del blocks[0]
    model.h = packed_blocks  # type: ignore[assignment]
    # Most of what 4 bits would cost, the head would: it gets 8.
    packed_head = pack_matrix(head, None, "int8" if kind == "int4" else kind)
    table = packed_head.table if isinstance(packed_head, ExactHead) else None
    for parameter in model.parameters():  # a view of the file would keep all of it mapped
        shared = parameter is head and table is not None
        parameter.data = cast("Tensor", table) if shared else parameter.data.clone()
    model.ops = PackedOps(packed_head, screen)
    model.state_dict = _refuse_to_save  # type: ignore[method-assign]


def _refuse_to_save(*_args: object, **_options: object) -> NoReturn:
    raise ValueError("a packed model cannot be saved: save it before pack()")
