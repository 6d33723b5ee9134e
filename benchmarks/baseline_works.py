"""Which work baselines.py measures, group by group, and what its results say of how it was done."""

from __future__ import annotations

import attention_baselines
import gla_baselines
import torch
from attention_baselines import AttentionWork
from gla_baselines import GlaWork
from scan_baselines import Work

AnyWork = Work | GlaWork | AttentionWork

NOTES = (
    "us: median time of one call; K calls on K sets of inputs lie in one CUDA graph, "
    "implementations take turns, events lie between replays: no host time for anyone.",
    "bytes: every tensor that must be read or written, once. percent_of_copy: the time of copy_ "
    "with as many bytes in the same harness, in the graph or on a stream, whichever is faster, "
    "over the implementation's time.",
    "hgru: lower bounds given, SiLU and gates inside the op; its backward is the op that autograd "
    "calls, dgamma's sums included.",
    "fla: its inputs x = (1 - decay) silu(c) and g = log decay are made beforehand, untimed, and "
    "its backward ends at dx and dg: both favour the baseline. Its autotuner chooses anew for "
    "every shape. Its GB/s count its own bytes: x, g, h; and g, h, dh, dx, dg.",
    "accelerated-scan: [B, D, T] layout, linear decays, beside linear_scan.",
    "wkv4: forward as without gradients; the backward pass reads, uncounted, a state in eight that "
    "the forward pass of training keeps. fla.fused_recurrent_rwkv4 keeps all of them.",
)
GLA_NOTES = (
    *NOTES[:2],
    "hgrn2: q, f and v are slices of one projection's result; SiLU on q, gates and keys inside the "
    "op. Backward passes are the ops that autograd calls, and keep nothing but the inputs.",
    "fla.chunk_gla: keys and log decays in bf16 are made beforehand, untimed, as they are for "
    "gated_linear_attention. Its autotuner chooses among all configurations for every shape of 16 "
    "heads; 12 heads take what its own keys give. fla.fused_recurrent_gla writes the new state "
    "elsewhere.",
    "peak_bytes: allocated at the peak of one forward and backward pass, above what was allocated "
    "before the inputs were: inputs, results, their gradients and workspace included.",
)
ATTENTION_NOTES = (
    *NOTES[:2],
    "TFLOP/s count the products of causal attention, 4 B H T T/2 D forward and 2.5 times that "
    "backward, whatever a kernel does; whole calls, sums of gates and all. Inputs are bf16, [B, T, "
    "H, D]; gates logsigmoid(N(0, 1) + 8), where work is pruned logsigmoid(N(0, 1)).",
    "matmul: bf16, 8192 x 8192 x 8192, in turns with the others. After matrix products everything "
    "is slower for a while, as if they had used the GPU's power up: 0.1 s lie before each turn, "
    "and every round has another order.",
    "Backward passes are the ops that autograd calls, the two Triton implementations' without "
    "autograd; torch's attentions without gates run theirs by autograd, on a stream.",
    "pruned: each row drops less than exp(-10) of its weight, which is the bound of the paper's "
    'kernel in its mode "auto". fla does not prune.',
    "The error is the largest of o, or of dq, dk, dv and dlog f; the baselines' is that of dlog f.",
    "extra_bytes_a_row: memory at the peak of one forward and backward pass beyond inputs, outputs "
    "and gradients, a row and head, as torch's allocator rounds it; the design allows 24, and 4 D "
    "more where dq is summed in fp32.",
    "Decoding reads K, V and gates of a full cache; percent_of_copy is over their bytes.",
)

AIMS = [
    Work("hgru", 8, 2048, 2048, "aims", (85, 80)),
    Work("hgru", 1, 131072, 1024, "aims", (80, 75)),
    Work("hgru", 64, 1024, 512, "aims", (80, 75)),
    Work("hgru", 8, 2048, 1024, "aims", (80, 70), complex=True),
    Work("lru_scan", 8, 2048, 1024, "aims", (85, 80), complex=True),
    Work("wkv4", 8, 4096, 2048, "aims", (75, 65)),
    Work("wkv4", 1, 65536, 1024, "aims", (60, 60)),
]
SWEEP = [
    Work("hgru", batch, time, channels, "sweep")
    for batch, time, channels in (
        (1, 65536, 2048),
        (1, 32768, 4096),
        (1, 16384, 512),
        (2, 16384, 1024),
        (2, 8192, 4096),
        (4, 8192, 256),
        (4, 4096, 2048),
        (8, 4096, 1024),
        (16, 1024, 2048),
        (16, 2048, 512),
        (32, 512, 1024),
        (64, 256, 512),
    )
]
EXTRA = [
    Work("hgru", 8, 2048, 2048, "extra", dtype=torch.float32),
    Work("hgru", 1, 65536, 512, "extra", complex=True),
    Work("lru_scan", 8, 2048, 2048, "extra"),
    Work("lru_scan", 1, 65536, 1024, "extra", complex=True),
    Work("linear_scan", 8, 2048, 2048, "extra"),
    Work("linear_scan", 1, 131072, 1024, "extra"),
    Work("linear_scan", 64, 1024, 512, "extra"),
    Work("hgru_step", 1, 1, 2048, "extra"),
    Work("hgru_step", 256, 1, 2048, "extra"),
]
GROUPS = ("aims", "sweep", "extra", "gla", "attention")
NOTES_OF = {"gla": GLA_NOTES, "attention": ATTENTION_NOTES}  # of a run of one group
WORKS = AIMS + SWEEP + EXTRA + gla_baselines.WORKS + attention_baselines.WORKS
TINY = [
    Work("hgru", 2, 33, 24, "aims", (80, 75)),
    Work("hgru", 3, 17, 8, "aims", (80, 70), complex=True),
    Work("hgru", 1, 40, 12, "sweep"),
    Work("hgru", 2, 9, 16, "extra", dtype=torch.float32),
    Work("lru_scan", 2, 21, 16, "aims", (85, 80), complex=True),
    Work("wkv4", 2, 19, 16, "aims", (75, 65)),
    Work("lru_scan", 2, 13, 16, "extra"),
    Work("linear_scan", 2, 21, 16, "extra"),
    Work("hgru_step", 4, 1, 16, "extra"),
    *gla_baselines.TINY,
    *attention_baselines.TINY,
]
