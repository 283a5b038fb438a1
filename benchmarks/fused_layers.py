"""Kernels of fused layers on a GPU: correct (vs. twins and float64), and how fast (vs. eager transformers, Liger).

    PYTHONPATH=<tree>[:<folder of liger_kernel>] python kern_bench.py [--sweep] [--tokens 8192] [--only norm,rotary]

Times are device times of the kernels by the profiler (host excluded), the second-level cache emptied before each call.
GB/s counts the bytes that must move (inputs read once, results written once). `host` is wall time per call at 64 tokens.
"""

import argparse, itertools, math, sys, time, warnings

warnings.filterwarnings("ignore")
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from fastpack_trl.kernels import gated as G, norm as N, rotary as R
from fastpack_trl.kernels.fused_form import GatedForm, NormForm, RotaryForm
from fastpack_trl.kernels.gated import gated
from fastpack_trl.kernels.norm import add_norm, norm
from fastpack_trl.kernels.rotary import rotary

p = argparse.ArgumentParser()
p.add_argument("--sweep", action="store_true")
p.add_argument("--tokens", type=int, default=8192)
p.add_argument("--only", default="")
p.add_argument("--device", default="cuda")
p.add_argument("--n", type=int, default=12)
p.add_argument("--skip-model", action="store_true")
p.add_argument("--skip-check", action="store_true")
A = p.parse_args()
DEV, T, BF = A.device, A.tokens, torch.bfloat16
CUDA = DEV == "cuda"
if CUDA:
    print(torch.cuda.get_device_name(), torch.__version__, "triton", __import__("triton").__version__)
    FLUSH = [torch.zeros(64 * 2**20, dtype=torch.int32, device=DEV) for _ in range(2)]
try:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction

    LIGER = True
except Exception as e:
    LIGER = False
    print("no liger:", repr(e)[:100])
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, LlamaRMSNorm
from transformers.activations import ACT2FN


def device_us(f, n):
    f()
    f()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(n):
            FLUSH[0].copy_(FLUSH[1])
            f()
        torch.cuda.synchronize()
    total = kernels = 0
    for e in prof.events():
        if e.device_type == torch.autograd.DeviceType.CUDA and "Memcpy DtoD" not in e.name:
            total += e.device_time
            kernels += 1  # torch 2.11
    return total / n, kernels / n


def leaves(ts, frozen=()):
    return [
        None if t is None else t.detach().requires_grad_(t.is_floating_point() and i not in frozen)
        for i, t in enumerate(ts)
    ]


def measure(f, tensors, frozen, n=A.n):
    ls = leaves(tensors, frozen)
    need = [l for l in ls if l is not None and l.requires_grad]
    outs = f(*ls)
    outs = (outs,) if isinstance(outs, torch.Tensor) else tuple(outs)
    ups = [torch.randn_like(o) for o in outs]
    # gradients of rotated q, k come from attention in (tokens, heads, dim): randn_like keeps the strides
    fwd = device_us(lambda: f(*ls), n)
    bwd = device_us(lambda: torch.autograd.grad(outs, need, ups, retain_graph=True), n)
    return fwd, bwd


def host_us(f, tensors, frozen):
    ls = leaves(tensors, frozen)
    need = [l for l in ls if l is not None and l.requires_grad]

    def both():
        outs = f(*ls)
        outs = (outs,) if isinstance(outs, torch.Tensor) else tuple(outs)
        return torch.autograd.grad(outs, need, [torch.ones_like(o) for o in outs])

    for _ in range(5):
        both()
    torch.cuda.synchronize()
    t = time.perf_counter()
    for _ in range(50):
        f(*ls)
    mid = time.perf_counter()
    torch.cuda.synchronize()
    t2 = time.perf_counter()
    for _ in range(50):
        both()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (mid - t) / 50 * 1e6, (end - t2) / 50 * 1e6


def err(a, e):
    return float((a.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30))


def check(name, f, tensors, frozen, f64=None):
    def run(fn, ts):
        ls = leaves(ts, frozen)
        need = [l for l in ls if l is not None and l.requires_grad]
        outs = fn(*ls)
        outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
        g = torch.Generator(DEV).manual_seed(1)
        ups = [torch.randn(o.shape, generator=g, device=DEV).to(BF).to(o) for o in outs]
        return [o.detach() for o in outs] + list(torch.autograd.grad(outs, need, ups))

    mine, again = run(f, tensors), run(f, tensors)
    saved = [m.runs_triton for m in (N, R, G)]
    for m in (N, R, G):
        m.runs_triton = lambda *a: False
    try:
        twin = run(f, tensors)
    finally:
        for m, s in zip((N, R, G), saved):
            m.runs_triton = s
    exact = run(f64 or f, [None if t is None else t.double() for t in tensors])
    bad = []
    for i, (a, b, t, e) in enumerate(zip(mine, again, twin, exact)):
        eps = torch.finfo(a.dtype).eps
        o, w = err(a, e), err(t, e)
        if not torch.equal(a, b):
            bad.append(f"[{i}] not repeatable")
        if a.stride() != t.stride() and i < 1:
            bad.append(f"[{i}] strides {a.stride()} {t.stride()}")
        if not o <= 2 * w + eps / 2:
            bad.append(f"[{i}] err {o:.2e} twin {w:.2e}")
    print(
        f"  check {name:34s} {'OK' if not bad else 'FAIL ' + '; '.join(bad)}   errors "
        + " ".join(f"{err(a, e):.1e}/{err(t, e):.1e}" for a, t, e in zip(mine, twin, exact)),
        flush=True,
    )


class Eager:
    @staticmethod
    def rms(x, w, eps=1e-6):
        d = x.dtype
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        return w * h.to(d)


def cases(H, HQ, HK, D, I, t=T):
    r = lambda *s, dt=BF: torch.randn(*s, device=DEV).to(dt)
    x, y, w = r(1, t, H), r(1, t, H), r(H)
    b = r(H)
    rf, lf = NormForm(1e-6, rounds=True, promotes=True), NormForm(1e-5, centers=True)
    B = 2
    xs = x.numel() * B
    lig = lambda fn: fn if LIGER else None
    lrms = lig(lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False))
    yield "norm frozen", lambda x, w: norm(x, w, None, rf), Eager.rms, lrms, [x, w], (1,), 2 * xs, 3 * xs
    yield "norm trained", lambda x, w: norm(x, w, None, rf), Eager.rms, lrms, [x, w], (), 2 * xs, 3 * xs
    yield (
        "add_norm frozen",
        lambda x, y, w: add_norm(x, y, w, None, rf),
        lambda x, y, w: ((s := x + y), Eager.rms(s, w)),
        None,
        [x, y, w],
        (2,),
        4 * xs,
        4 * xs,
    )
    yield (
        "layernorm trained",
        lambda x, w, b: norm(x, w, b, lf),
        lambda x, w, b: nn.functional.layer_norm(x, (H,), w, b, 1e-5),
        lig(lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-5)),
        [x, w, b],
        (),
        2 * xs,
        3 * xs,
    )
    q, k = r(1, t, HQ, D), r(1, t, HK, D)
    wq, wk = r(D), r(D)
    yield (
        "q norm frozen",
        lambda x, w: norm(x, w, None, rf),
        Eager.rms,
        lrms,
        [q, wq],
        (1,),
        2 * q.numel() * B,
        3 * q.numel() * B,
    )
    yield (
        "q norm trained",
        lambda x, w: norm(x, w, None, rf),
        Eager.rms,
        lrms,
        [q, wq],
        (),
        2 * q.numel() * B,
        3 * q.numel() * B,
    )
    ang = torch.randn(1, t, D // 2, device=DEV)
    ang = torch.cat([ang, ang], -1)
    cos, sin = ang.cos().to(BF), ang.sin().to(BF)
    qt, kt = q.transpose(1, 2), k.transpose(1, 2)
    qk = (q.numel() + k.numel()) * B
    ro = RotaryForm(promotes=True)
    c = lambda x: (cos.double(), sin.double()) if x.dtype == torch.float64 else (cos, sin)
    yield (
        "rotary",
        lambda q, k: rotary(q, k, *c(q), ro),
        lambda q, k: apply_rotary_pos_emb(q, k, cos, sin),
        lig(lambda q, k: LigerRopeFunction.apply(q, k, cos, sin)),
        [qt, kt],
        (),
        2 * qk,
        2 * qk,
    )
    pr = RotaryForm("pairs", "pairs", "first")
    yield "rotary interleaved", lambda q, k: rotary(q, k, *c(q), pr), None, None, [qt, kt], (), 2 * qk, 2 * qk
    eager_nr = lambda q, k, a, b: apply_rotary_pos_emb(Eager.rms(q, a), Eager.rms(k, b), cos, sin)
    liger_nr = lig(
        lambda q, k, a, b: LigerRopeFunction.apply(
            lrms(q.transpose(1, 2), a).transpose(1, 2), lrms(k.transpose(1, 2), b).transpose(1, 2), cos, sin
        )
    )
    two = lambda q, k, a, b: rotary(
        norm(q.transpose(1, 2), a, None, rf).transpose(1, 2),
        norm(k.transpose(1, 2), b, None, rf).transpose(1, 2),
        *c(q),
        ro,
    )
    one = lambda q, k, a, b: rotary(q, k, *c(q), ro, rf, a, b)
    yield "q/k norm+rotary, 3 launches", two, eager_nr, liger_nr, [qt, kt, wq, wk], (2, 3), 2 * qk, 3 * qk
    yield "q/k norm+rotary, 1 launch", one, None, None, [qt, kt, wq, wk], (2, 3), 2 * qk, 3 * qk
    yield "q/k norm+rotary, 1, trained", one, eager_nr, liger_nr, [qt, kt, wq, wk], (), 2 * qk, 3 * qk
    g, u = r(1, t, I), r(1, t, I)
    gb = g.numel() * B
    silu, gelu = ACT2FN["silu"], ACT2FN["gelu_pytorch_tanh"]
    yield (
        "gated silu",
        lambda g, u: gated(g, u, GatedForm("silu")),
        lambda g, u: silu(g) * u,
        lig(lambda g, u: LigerSiLUMulFunction.apply(g, u)),
        [g, u],
        (),
        3 * gb,
        5 * gb,
    )
    yield (
        "gated gelu_tanh",
        lambda g, u: gated(g, u, GatedForm("gelu_tanh")),
        lambda g, u: gelu(g) * u,
        lig(lambda g, u: LigerGELUMulFunction.apply(g, u)),
        [g, u],
        (),
        3 * gb,
        5 * gb,
    )
    h = torch.cat([g, u], -1)
    yield (
        "gated silu, one tensor",
        lambda h: gated(h, None, GatedForm("silu")),
        lambda h: (lambda a, b: silu(a) * b)(*h.chunk(2, -1)),
        None,
        [h],
        (),
        3 * gb,
        5 * gb,
    )


SHAPES = {"0.6B": (1024, 16, 8, 128, 3072), "8B": (4096, 32, 8, 128, 12288)}
wanted = lambda name: not A.only or any(o in name for o in A.only.split(","))


def model_part():
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from fastpack_trl.layers.replace import fused_layers

    c = Qwen3Config(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    m = Qwen3ForCausalLM(c).to(DEV, BF).requires_grad_(False)
    e = torch.randn(1, T, 1024, device=DEV).to(BF).requires_grad_()
    up = torch.randn(1, T, 1024, device=DEV)

    def step():
        return torch.autograd.grad(
            (m.model(inputs_embeds=e, use_cache=False).last_hidden_state.float() * up).mean(), e
        )[0]

    def wall(n=10):
        step()
        torch.cuda.synchronize()
        t = time.perf_counter()
        for _ in range(n):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - t) / n * 1e3

    base = step().float()
    plain = device_us(step, 5)
    pw = wall()
    t = time.perf_counter()
    with fused_layers(m, dtype=BF, autocast=False) as report:
        torch.cuda.synchronize()
        cold = time.perf_counter() - t
        new = step().float()
        ours = device_us(step, 5)
        ow = wall()
    t = time.perf_counter()
    with fused_layers(m, dtype=BF, autocast=False):
        warm = time.perf_counter() - t
    print(f"model, 4 layers of 0.6B, {T} tokens (causal sdpa): {report}; proof {cold:.2f} s cold, {warm:.2f} s warm")
    print(
        f"  device ms eager {plain[0] / 1e3:.2f} ({plain[1]:.0f} kernels), fused {ours[0] / 1e3:.2f} ({ours[1]:.0f}); wall ms {pw:.2f}, {ow:.2f}; gradients differ {err(new, base):.2e}"
    )


def main():
    start = time.perf_counter()
    if not A.skip_check:
        for label, shape in SHAPES.items():
            print(f"== correct, {label}, {T} tokens")
            for name, f, _, _, ts, frozen, *_ in cases(*shape):
                if wanted(name):
                    check(name, f, ts, frozen)
        for w in (80, 96, 112, 100, 2880):
            x = torch.randn(3, 77, w, device=DEV).to(BF)
            wt = torch.randn(w, device=DEV)
            check(
                f"norm width {w} fp32 weight",
                lambda x, w: norm(x, w, None, NormForm(1e-6, rounds=True, promotes=True)),
                [x, wt],
                (),
            )
            q = torch.randn(2, 33, 5, w, device=DEV).to(BF).transpose(1, 2)
            cs = torch.randn(2, 33, w, device=DEV), torch.randn(2, 33, w, device=DEV)
            check(
                f"rotary width {w}",
                lambda q, k: rotary(
                    q, k, *(t.to(torch.promote_types(q.dtype, torch.float32)) for t in cs), RotaryForm()
                ),
                [q, q[:, :2]],
                (),
            )
            check(f"gated width {w}", lambda g, u: gated(g, u, GatedForm("gelu")), [x, x.flip(0)], ())
        if CUDA and torch.cuda.mem_get_info()[0] > 60e9:  # more than 2^31 elements
            n = 200_000
            x = torch.randn(n, 12288, device=DEV, dtype=BF)
            w = torch.ones(12288, device=DEV, dtype=BF)
            o = norm(x, w, None, NormForm(1e-6))
            a = gated(x, x, GatedForm("silu"))
            last = x[-5:]
            print(
                "  int64 norm",
                torch.equal(o[-5:], norm(last, w, None, NormForm(1e-6))),
                "gated",
                torch.equal(a[-5:], gated(last, last, GatedForm("silu"))),
            )
            del x, o, a
            torch.cuda.empty_cache()
    print(f"-- {time.perf_counter() - start:.0f} s")
    for label, shape in SHAPES.items():
        print(f"== {label}, {T} tokens: us forward (GB/s, kernels) / backward (GB/s, kernels)")
        for name, ours, eager, liger, ts, frozen, fb, bb in cases(*shape):
            if not wanted(name):
                continue
            row = f"  {name:30s}"
            for who, f in (("ours", ours), ("eager", eager), ("liger", liger)):
                if f is None:
                    row += f" | {who} -"
                    continue
                try:
                    (fu, fk), (bu, bk) = measure(f, ts, frozen)
                    row += f" | {who} {fu:7.1f} ({fb / fu / 1e3:5.0f}, {fk:.0f}) / {bu:7.1f} ({bb / bu / 1e3:5.0f}, {bk:.0f})"
                except Exception as e:
                    row += f" | {who} {repr(e)[:60]}"
            print(row, flush=True)
    print("== host us per call at 64 tokens, 0.6B: forward / forward and backward")
    for name, ours, eager, liger, ts, frozen, *_ in cases(*SHAPES["0.6B"], t=64):
        if not wanted(name):
            continue
        row = f"  {name:30s}"
        for who, f in (("ours", ours), ("eager", eager), ("liger", liger)):
            if f is not None:
                try:
                    row += " | %s %.0f / %.0f" % (who, *host_us(f, ts, frozen))
                except Exception as e:
                    row += f" | {who} {repr(e)[:60]}"
        print(row, flush=True)
    if not A.skip_model:
        model_part()
    if A.sweep:
        sweep()
    print(f"-- {time.perf_counter() - start:.0f} s")


def sweep():
    from fastpack_trl.kernels import gated_triton as GT, norm_triton as NT, rotary_triton as RT

    for label, shape in SHAPES.items():
        by = {c[0]: c for c in cases(*shape)}
        for name, mod, grid in (
            ("norm frozen", NT, [dict(_TILE=t, _PER_WARP=p) for t in (1024, 2048, 4096) for p in (256, 512, 1024)]),
            ("q norm frozen", NT, [dict(_TILE=t) for t in (1024, 2048, 4096, 8192)]),
            ("norm trained", NT, [dict(_TILE=t, _PER_WARP=p) for t in (1024, 2048, 4096) for p in (256, 512)]),
            ("rotary", RT, [dict(_TILE=t, _WARPS=w) for t in (2048, 4096, 8192) for w in (4, 8)]),
            ("q/k norm+rotary, 1 launch", RT, [dict(_TILE=t, _WARPS=w) for t in (2048, 4096, 8192) for w in (4, 8)]),
            (
                "gated silu",
                GT,
                [
                    dict(_ROWS=r, _MAX_COLUMNS=c, _WARPS=w)
                    for r, c in ((1, 1024), (1, 2048), (2, 1024), (4, 512), (8, 512))
                    for w in (4, 8)
                ],
            ),
        ):
            _, f, _, _, ts, frozen, fb, bb = by[name]
            before = dict(vars(mod))
            best = []
            for setting in grid:
                for key, v in setting.items():
                    setattr(mod, key, v)
                try:
                    (fu, _), (bu, _) = measure(f, ts, frozen, 6)
                except Exception as e:
                    print("  ", name, setting, repr(e)[:80])
                    continue
                best.append((fu + bu, fu, bu, setting))
            for key in grid[0]:
                setattr(mod, key, before[key])
            best.sort(key=lambda b: b[0])
            print(
                f"  sweep {label} {name}: "
                + "; ".join(f"{s} {a:.0f}+{b:.0f}" for _, a, b, s in best[:3])
                + f" ... worst {best[-1][0]:.0f}",
                flush=True,
            )


main()
