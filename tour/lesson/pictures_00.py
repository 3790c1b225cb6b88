"""What lesson 00 measures and draws."""

import time

import matplotlib.pyplot as plt
import torch
import triton

import tilewise

from . import DEVICE, ON_GPU, show

COPIED = 1 << 24  # elements
READ_BYTES = 2 << 30
SIDE = 8192  # of the square matrices whose product gives the matmul rate
ADDED, ROWS, COLUMNS = 1 << 26, 16384, 4096  # of the vector add and the softmax
SEQLEN, HEADDIM, HEADS = 4096, 128, 16
SIZES = (
    "SMs",
    "registers of an SM, KiB",
    "shared memory of an SM, KiB",
    "L2, MiB",
    "HBM, GiB",
)


def card(figures):
    """Prints what the driver says of the card."""

    def measure(name):
        of = torch.cuda.get_device_properties(0)
        sizes = (
            of.multi_processor_count,
            of.regs_per_multiprocessor * 4 / 2**10,
            of.shared_memory_per_multiprocessor / 2**10,
            of.L2_cache_size / 2**20,
            of.total_memory / 2**30,
        )
        return dict(zip(SIZES, sizes))[name]

    for name in SIZES:
        number = figures.value(
            {"what": "card"}, name, lambda name=name: measure(name)
        )
        print(
            f"{name:>28}: {'not recorded' if number is None else f'{number:,.0f}'}"
        )


def strides(figures, strided_copy, sectors_of_a_warp, strides=(1, 2, 4, 8, 16, 32)):
    """Times copies of equally many elements; draws them beside counted sectors."""
    source = torch.zeros(COPIED * max(strides) if ON_GPU else 0, device=DEVICE)
    target = torch.empty(COPIED if ON_GPU else 0, device=DEVICE)
    copy_ms = {}
    for stride in strides:
        part = source[: COPIED * stride]
        calls = {
            "tour": lambda part=part, stride=stride: strided_copy(
                part, stride, target
            )
        }
        shape = {"what": "strided copy", "n": COPIED, "stride": stride}
        found = figures.times(shape, calls, rounds=3, round_ms=10.0)
        copy_ms |= {stride: found["tour"]} if found else {}
    figure, axes = plt.subplots(figsize=(6, 3.2))
    one = sectors_of_a_warp(1)
    predicted = [
        (sectors_of_a_warp(stride) + one) / (2 * one) for stride in strides
    ]
    axes.plot(strides, predicted, "k--", label="sectors moved, counted")
    if copy_ms:
        ratios = [copy_ms[stride] / copy_ms[1] for stride in copy_ms]
        axes.plot(list(copy_ms), ratios, "ko-", label="time, measured")
    axes.set_xscale("log", base=2)
    axes.set_xticks(strides, [str(stride) for stride in strides])
    axes.set(xlabel="stride", ylabel="times that of stride 1", ylim=(0, None))
    axes.set_title(
        f"Copying one element in `stride`\n({figures.machine})", fontsize=9
    )
    axes.legend()
    show(figure, "00_gpu_stride")


def read_bandwidth(figures, read):
    """TB/s, printed; None where nothing was recorded."""
    x = torch.ones(READ_BYTES // 4 if ON_GPU else 0, device=DEVICE)
    sums = torch.empty(
        triton.cdiv(READ_BYTES // 4, 4096) if ON_GPU else 0, device=DEVICE
    )
    calls = {"tour": lambda: read(x, sums)}
    found = figures.times({"what": "read", "bytes": READ_BYTES}, calls)
    bandwidth = READ_BYTES / found["tour"] * 1e-9 if found else None
    print(
        "read bandwidth:", f"{bandwidth:.2f} TB/s" if bandwidth else figures.machine
    )
    return bandwidth


def launch_cost(figures, kernel, bandwidth, launches=2000):
    """Prints microseconds per launch in a row, and the bytes read meanwhile."""

    def measure():
        x = torch.empty(1, device=DEVICE)
        for _ in range(20):
            kernel[(1,)](x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            kernel[(1,)](x)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / launches * 1e6

    launch_us = figures.value({"what": "launch"}, "microseconds", measure)
    print(
        "a launch:",
        f"{launch_us:.1f} microseconds" if launch_us else figures.machine,
    )
    if launch_us and bandwidth:
        print(f"in that time HBM delivers {bandwidth * launch_us:.1f} MB")


def matmul_rates(figures):
    """TFLOP/s of torch's matmul by dtype, printed."""
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        side = SIDE if ON_GPU else 0
        a, b = (torch.randn(side, side, device=DEVICE).to(dtype) for _ in range(2))
        name = str(dtype).removeprefix("torch.")
        shape = {"what": "matmul", "n": SIDE, "dtype": name}
        calls = {"torch": lambda a=a, b=b: torch.matmul(a, b)}
        found = figures.times(shape, calls, flops=2 * SIDE**3)
        if found:
            rates[name] = 2 * SIDE**3 / found["torch"] * 1e-9
        print(
            f"{name:>9}:",
            f"{rates[name]:6.0f} TFLOP/s" if found else figures.machine,
        )
    return rates


def standard_attention(q, k, v):
    """Three kernels, scores in HBM between them; (heads, seqlen, headdim)."""
    scores = torch.matmul(q * HEADDIM**-0.5, k.transpose(1, 2))
    return torch.matmul(torch.softmax(scores, -1), v)


def measured_calls():
    """The five operations of the roofline at their sizes."""
    bf16 = dict(device=DEVICE, dtype=torch.bfloat16)
    x, y = torch.ones(2, ADDED, device=DEVICE)
    rows = torch.randn(ROWS, COLUMNS, **bf16)
    a, b = torch.randn(2, SIDE, SIDE, **bf16)
    q, k, v = torch.randn(3, HEADS, SEQLEN, HEADDIM, **bf16)
    # (1, seqlen, heads, headdim)
    batch = [t.transpose(0, 1)[None] for t in (q, k, v)]
    expected = tilewise.attention(*batch)[0].transpose(0, 1)
    torch.testing.assert_close(
        standard_attention(q, k, v), expected, rtol=0, atol=2e-2
    )
    return {
        "vector add": lambda: torch.add(x, y),
        "softmax": lambda: torch.softmax(rows, -1),
        "standard attention": lambda: standard_attention(q, k, v),
        "fused attention": lambda: tilewise.attention(*batch),
        "matmul": lambda: torch.matmul(a, b),
    }


def roofline(figures, operations, bandwidth, rates):
    """Times operations, given by FLOPs and bytes, and draws them under the roof."""
    calls = measured_calls() if ON_GPU else dict.fromkeys(operations)
    reached = {}
    for name, (flops, _) in operations.items():
        shape = {"what": "roofline", "operation": name}
        found = figures.times(shape, {name: calls[name]}, flops=flops, rounds=3)
        reached |= {name: flops / found[name] * 1e-9} if found else {}
    peak = rates.get("bfloat16")
    figure = draw_roofline(operations, bandwidth, peak, reached, figures.machine)
    show(figure, "00_gpu_roofline")
    if bandwidth and peak:
        print(f"the ridge: {peak / bandwidth:.0f} FLOP per byte")


def draw_roofline(operations, bandwidth, peak, reached, machine):
    """The roof and operations under it; without a card's numbers, intensities."""
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.set_xscale("log")
    axes.set_xlabel("arithmetic intensity, FLOP per byte")
    intensities = {
        name: flops / moved for name, (flops, moved) in operations.items()
    }
    known = bandwidth is not None and peak is not None
    if known:
        ends = [0.03, peak / bandwidth, 30_000]
        roof = [min(peak, bandwidth * intensity) for intensity in ends]
        axes.plot(
            ends,
            roof,
            "k-",
            label=f"{bandwidth:.2f} TB/s and {peak:.0f} TFLOP/s, measured",
        )
        axes.set_yscale("log")
        axes.set_ylabel("TFLOP/s")
    else:
        axes.set_yticks([])
    for place, (name, intensity) in enumerate(intensities.items()):
        height = min(peak, bandwidth * intensity) if known else place
        axes.plot(intensity, height, "ko", fillstyle="none")
        if name in reached:
            axes.plot(intensity, reached[name], "k^")
            axes.plot([intensity] * 2, [height, reached[name]], "k:", linewidth=0.8)
        shift, side = (5, "left") if name == "matmul" else (-5, "right")
        label = dict(
            xytext=(shift, 6), textcoords="offset points", ha=side, fontsize=8
        )
        axes.annotate(name, (intensity, height), **label)
    axes.plot([], [], "ko", fillstyle="none", label="as the two counts allow")
    if reached:
        axes.plot([], [], "k^", label="as measured")
    axes.margins(0.15, 0.25)
    axes.legend(loc="lower right", fontsize=7)
    axes.set_title(f"Roofline ({machine})", fontsize=9)
    return figure
