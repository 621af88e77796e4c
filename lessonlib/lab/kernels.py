"""What quantization gains: real kernels that multiply by 16, 8 and 4-bit weights, and model files for llama.cpp.

A kernel is torch's own routine for a product with weights of that format. Each class takes the place of llama.Linear:
fp32 in, fp32 out, so the rest of the model stays as it is. Which of them runs, and how fast, depends on the processor:
`available_kernels` tries them out.
"""

import copy
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm.auto import tqdm

from lessonlib.checks import check_choice, check_count
from lessonlib.lab.llama import Linear, Llama
from lessonlib.lab.measure import DecodeTime, measure_decode
from lessonlib.lab.pretrained import fetch
from lessonlib.lab.quality import MATRICES
from lessonlib.quantization import encode_blocks, quantize

INT4_GROUP = 32
SMALLEST_ABSMAX = 1e-12  # below it a row of activations counts as zeros


class Kernel(Linear):
    """A linear layer whose weights are kept in another format. Takes fp32 weights (outputs, inputs)."""

    num_bytes: int
    """that a decode step reads: weights, scales and zero points"""

    def __call__(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, x.shape[-1]))
        return y.float().view(*x.shape[:-1], -1)

    def product(self, x: Tensor) -> Tensor:
        """x W^T of x (rows, inputs)."""
        raise NotImplementedError

    def dequantized(self) -> Tensor:
        """The weights (outputs, inputs) that the kernel multiplies by, in fp32."""
        raise NotImplementedError


class BFloat16Linear(Kernel):
    """Weights and inputs in bf16."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.to(torch.bfloat16).contiguous()
        self.num_bytes = self.weight.numel() * 2

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self.weight)

    def dequantized(self) -> Tensor:
        return self.weight.float()


class _Int8(Kernel):
    def __init__(self, weight: Tensor) -> None:
        tensor = quantize(weight.numpy(), 8, "channel")
        self.weight, self.scale = torch.from_numpy(tensor.codes), torch.from_numpy(tensor.scale[:, 0])
        self.num_bytes = self.weight.numel() + self.scale.numel() * 2

    def dequantized(self) -> Tensor:
        return self.weight.float() * self.scale.float()[:, None]


class Int8Linear(_Int8):
    """Weights in int8 with a bf16 scale for each output, inputs in bf16 ("weight-only", W8A16)."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.scale = self.scale.to(torch.bfloat16)  # the kernel wants the type of the inputs; with fp32 it crawls

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x.to(torch.bfloat16), self.weight, self.scale)


class Int8DynamicLinear(_Int8):
    """Weights in int8 with a scale for each output, inputs rounded to 8 bits with a scale for each row (W8A8).

    The products are whole numbers, for which many processors have an instruction of their own (on x86: VNNI). The
    kernel finds one scale for all rows; so rows are first brought to the same size. (Without that, the first token of a
    prompt, whose activations are by far the largest, would leave the other tokens hardly any steps.)
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.num_bytes += self.scale.numel() * 2  # fp32 scales
        zeros = torch.zeros(len(self.weight), dtype=torch.int64)
        with warnings.catch_warnings():
            # torch means to replace this kind of tensor, not the kernel; no other way into the kernel takes codes
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
            codes = torch._make_per_channel_quantized_tensor(self.weight, self.scale.double(), zeros, 0)
        self.packed = torch.ops.quantized.linear_prepack(codes, None)  # in the order that this processor likes

    def product(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            return torch.ops.quantized.linear_dynamic(x, self.packed)
        size = x.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_ABSMAX)
        return torch.ops.quantized.linear_dynamic(x / size, self.packed) * size


class Int4Linear(Kernel):
    """Weights in 4 bits, groups of 32 with a bf16 scale and a bf16 zero, inputs in bf16 (W4A16)."""

    def __init__(self, weight: Tensor) -> None:
        tensor = quantize(weight.numpy(), 4, "group", INT4_GROUP, symmetric=False)
        # two codes to a byte, in the order that this processor likes
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(tensor.codes).int(), 1)
        # the kernel computes (code - 8) x scale + zero
        zero = (8 - tensor.zero_point) * tensor.scale
        both = np.stack([tensor.scale.T, zero.T], axis=-1)  # (groups, outputs, 2)
        self.scale = torch.from_numpy(both).to(torch.bfloat16).contiguous()
        self.codes = torch.from_numpy(tensor.codes)
        self.num_bytes = self.weight.numel() * self.weight.element_size() + self.scale.numel() * 2

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x.to(torch.bfloat16), self.weight, INT4_GROUP, self.scale)

    def dequantized(self) -> Tensor:
        scale, zero = (part.float().t().repeat_interleave(INT4_GROUP, dim=1) for part in self.scale.unbind(-1))
        return (self.codes.float() - 8) * scale + zero


KERNELS: dict[str, type[Linear]] = {
    "fp32": Linear,
    "bf16": BFloat16Linear,
    "int8": Int8Linear,
    "int8 dynamic": Int8DynamicLinear,
    "int4": Int4Linear,
}
"""by name; the head of "int4" is in int8, as 4 bits would cost it most"""


def available_kernels() -> list[str]:
    """The kernels that this processor and torch have, tried out on a small product."""
    weight, x = torch.linspace(-1, 1, 64 * 64).view(64, 64), torch.linspace(-1, 1, 64)[None]
    found = []
    for name, kernel in KERNELS.items():
        try:
            layer = kernel(weight)
            right = x @ (layer.dequantized() if isinstance(layer, Kernel) else weight).t()
            if torch.allclose(layer(x), right, rtol=0.05, atol=0.05 * float(right.abs().max())):
                found.append(name)
        except (RuntimeError, AttributeError, NotImplementedError):  # an operator that is not there, or not for this
            continue
    return found


def with_kernel(model: Llama, kernel: str) -> Llama:
    """A copy of `model` (fp32) whose linear layers, the head included, use a kernel; embedding and norms are shared.

    Raises ValueError for a name that is not in KERNELS.
    """
    make = KERNELS[check_choice("kernel", kernel, KERNELS)]
    result = copy.copy(model)
    result.blocks = [copy.copy(block) for block in model.blocks]
    if kernel == "fp32":
        return result
    for block in tqdm(result.blocks, desc=f"converting to {kernel}", unit="layer", leave=False):
        for name in MATRICES:
            setattr(block, name, make(getattr(block, name).weight))
    result.head = (Int8Linear if kernel == "int4" else make)(model.head.weight)
    return result


def kernel_bytes(model: Llama) -> int:
    """Bytes that a decode step reads of the weights of a model made by `with_kernel`, norms in fp32 included."""
    layers = [model.head, *(getattr(block, name) for block in model.blocks for name in MATRICES)]
    norms = [model.final_norm, *(norm for block in model.blocks for norm in (block.attention_norm, block.mlp_norm))]
    read = sum(layer.num_bytes if isinstance(layer, Kernel) else layer.weight.nbytes for layer in layers)
    return read + sum(norm.weight.nbytes for norm in norms)


@dataclass(frozen=True)
class KernelTime:
    """The decode steps of one kernel at one batch size."""

    kernel: str
    weight_bytes: int
    """read in each step"""
    decode: DecodeTime

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole batch."""
        return self.decode.tokens_per_s

    @property
    def read_bandwidth(self) -> float:
        """Weight bytes per second (B/s) that the step amounts to."""
        return self.weight_bytes / self.decode.step_s


def measure_kernels(
    model: Llama,
    kernels: Sequence[str] | None = None,
    batch_sizes: Sequence[int] = (1, 16),
    context_len: int = 64,
    steps: int = 12,
    rounds: int = 2,
) -> list[KernelTime]:
    """Time `model` (fp32) decoding with each kernel at each batch size, end to end.

    All kernels take their turn in each of the `rounds` of `steps` steps, and each one's quickest round counts: then a
    machine that is busy for a moment does not make one kernel look slow. By default with all kernels that run here.
    Raises ValueError for another kernel, fewer than 1 round, and as `measure_decode`.
    """
    check_count("rounds", rounds)
    changed = {name: with_kernel(model, name) for name in (available_kernels() if kernels is None else kernels)}
    times: dict[str, list[list[DecodeTime]]] = {name: [] for name in changed}
    for _ in range(rounds):
        for name, with_it in changed.items():
            times[name].append(measure_decode(with_it, batch_sizes, context_len, steps))
    return [
        KernelTime(name, kernel_bytes(changed[name]), min(decodes, key=lambda decode: decode.step_s))
        for name, several in times.items()
        for decodes in zip(*several, strict=True)
    ]


# Files for llama.cpp

FILE_TYPES = {
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}


def write_gguf(path: str | os.PathLike[str], file_format: str, source: str | os.PathLike[str] | None = None) -> Path:
    """Write the model of `source` (a GGUF file; by default the course's) with its matrices as F16, Q8_0 or Q4_0.

    Norms stay in fp32. The embedding, which is the head too, becomes F16 in an F16 file and otherwise stays as it is
    in the source (Q8_0). The bytes are those of lessonlib.quantization.encode_blocks. The file appears when it is
    whole. Returns its path. Raises ValueError for another format.
    """
    check_choice("file_format", file_format, FILE_TYPES)
    target = Path(path)
    reader = gguf.GGUFReader(fetch() if source is None else source)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        writer = gguf.GGUFWriter(fresh, reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture":
                continue  # the writer adds these
            kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
            value = int(FILE_TYPES[file_format]) if name == "general.file_type" else field.contents()
            writer.add_key_value(name, value, kind, inner)
        for tensor in tqdm(reader.tensors, desc=f"encoding {file_format}", unit="tensor", leave=False):
            data, raw_dtype = _encoded(tensor, file_format)
            writer.add_tensor(tensor.name, data, raw_dtype=raw_dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        fresh.replace(target)
    return target


def _encoded(tensor: gguf.ReaderTensor, file_format: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """A tensor's data in the new format, and what that is."""
    kept = tensor.name == "token_embd.weight" and file_format != "F16"
    if kept or len(tensor.shape) == 1:
        return tensor.data, tensor.tensor_type
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    if file_format == "F16":
        return values.astype(np.float16), gguf.GGMLQuantizationType.F16
    return encode_blocks(values, file_format), gguf.GGMLQuantizationType[file_format]
